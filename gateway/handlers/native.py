"""``POST /client/v4/accounts/{account}/ai/run/{model}``: the native surface."""

from __future__ import annotations

from billing.usage import Surface
from gateway.errors import Refusal, bad_input
from gateway.wire.openai import DONE_FRAME, ChatRequest, decode_chat, frame, with_usage
from gateway.wire.workers_ai import encode_refusal, envelop, native_tail


class NativeForm:
    """Enveloped JSON; streams end in a usage chunk and a native tail, whatever ``stream_options`` says."""

    name: Surface = "run"

    def __init__(self, max_choices: int) -> None:
        self._max_choices = max_choices

    def decode(self, body: bytes, path_model: str | None, query: str) -> ChatRequest:
        if "queueRequest=true" in query:
            raise bad_input("queueRequest", "asynchronous batches are not available here")
        return decode_chat(body, path_model=path_model, allows_prompt=True, max_choices=self._max_choices)

    def completion(self, completion: bytes, usage: bytes) -> bytes:
        return envelop(with_usage(completion, usage))

    def stream_end(self, final_chunk: bytes, usage: bytes, *, includes_usage: bool) -> bytes:
        return frame(with_usage(final_chunk, usage)) + native_tail(usage) + DONE_FRAME

    def refusal(self, refusal: Refusal, request_id: str) -> bytes:
        return encode_refusal(refusal, request_id)
