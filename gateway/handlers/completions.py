"""``POST .../ai/v1/completions`` and ``/v1/completions``: OpenAI's legacy completions."""

from __future__ import annotations

from collections.abc import Callable

from billing.usage import Surface
from gateway.errors import Refusal
from gateway.wire.completions import decode_completions
from gateway.wire.openai import ChatRequest


class CompletionsForm:
    """Every request brings an answer form of its own. ``encode_refusal`` makes the body of a refusal."""

    name: Surface = "v1"

    def __init__(self, max_choices: int, encode_refusal: Callable[[Refusal, str], bytes]) -> None:
        self._max_choices = max_choices
        self._encode_refusal = encode_refusal

    def decode(self, body: bytes, path_model: str | None, query: str) -> ChatRequest:
        return decode_completions(body, max_choices=self._max_choices)

    def completion(self, completion: bytes, usage: bytes) -> bytes:
        return completion  # written by the request's own form

    def stream_end(self, final_chunk: bytes, usage: bytes, *, includes_usage: bool) -> bytes:
        return b""  # written by the request's own form

    def refusal(self, refusal: Refusal, request_id: str) -> bytes:
        return self._encode_refusal(refusal, request_id)
