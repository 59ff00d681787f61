"""``POST .../ai/v1/chat/completions`` and ``/v1/chat/completions``: the OpenAI-compatible surface."""

from __future__ import annotations

from collections.abc import Callable

from billing.usage import Surface
from gateway.errors import Refusal
from gateway.wire.openai import DONE_FRAME, ChatRequest, decode_chat, frame, with_usage
from gateway.wire.workers_ai import encode_refusal


class OpenAIForm:
    """Bare OpenAI objects; a usage chunk only when the client asked for it. ``encode_refusal`` makes the
    body of a refusal.
    """

    name: Surface = "v1"

    def __init__(
        self, max_choices: int, encode_refusal: Callable[[Refusal, str], bytes] = encode_refusal
    ) -> None:
        self._max_choices = max_choices
        self._encode_refusal = encode_refusal

    def decode(self, body: bytes, path_model: str | None, query: str) -> ChatRequest:
        return decode_chat(body, path_model=path_model, allows_prompt=False, max_choices=self._max_choices)

    def completion(self, completion: bytes, usage: bytes) -> bytes:
        return with_usage(completion, usage)

    def stream_end(self, final_chunk: bytes, usage: bytes, *, includes_usage: bool) -> bytes:
        return frame(with_usage(final_chunk, usage)) + DONE_FRAME if includes_usage else DONE_FRAME

    def refusal(self, refusal: Refusal, request_id: str) -> bytes:
        return self._encode_refusal(refusal, request_id)
