"""``POST /run`` and ``POST /ai-gateway/run``: what ``env.AI.run`` of a Worker calls."""

from __future__ import annotations

import msgspec

from billing.usage import Surface
from gateway.errors import Refusal
from gateway.wire.binding import decode_run, encode_refusal
from gateway.wire.openai import DONE_FRAME, ChatRequest, decode_chat, frame, with_usage
from gateway.wire.workers_ai import native_tail


class BindingForm:
    """Bare JSON; streams end like those of the native surface."""

    name: Surface = "binding"

    def __init__(self, max_choices: int) -> None:
        self._max_choices = max_choices

    def decode(self, body: bytes, path_model: str | None, query: str) -> ChatRequest:
        run = decode_run(body, query)
        chat = decode_chat(
            run.inputs, path_model=path_model, allows_prompt=True, max_choices=self._max_choices
        )
        options = run.options
        if options is None:
            return chat
        return msgspec.structs.replace(
            chat,
            body=msgspec.structs.replace(chat.body, options=options),
            rejects_if_busy=bool(options.reject_if_busy),
        )

    def completion(self, completion: bytes, usage: bytes) -> bytes:
        return with_usage(completion, usage)

    def stream_end(self, final_chunk: bytes, usage: bytes, *, includes_usage: bool) -> bytes:
        return frame(with_usage(final_chunk, usage)) + native_tail(usage) + DONE_FRAME

    def refusal(self, refusal: Refusal, request_id: str) -> bytes:
        return encode_refusal(refusal)
