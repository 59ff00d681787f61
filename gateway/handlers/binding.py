"""``POST /run`` and ``POST /ai-gateway/run``: what ``env.AI.run`` of a Worker calls."""

from __future__ import annotations

import msgspec

from billing.usage import Surface
from gateway.catalog import Catalog
from gateway.errors import Refusal
from gateway.wire.binding import decode_run, encode_refusal
from gateway.wire.embeddings import EmbeddingsRequest
from gateway.wire.openai import DONE_FRAME, ChatRequest, frame, with_usage
from gateway.wire.run_body import RunLimits, decode_run_body
from gateway.wire.workers_ai import native_tail


class BindingForm:
    """Bare JSON; streams end like those of the native surface."""

    name: Surface = "binding"

    def __init__(self, catalog: Catalog, limits: RunLimits) -> None:
        self._catalog = catalog
        self._limits = limits

    def decode(self, body: bytes, path_model: str | None, query: str) -> ChatRequest | EmbeddingsRequest:
        run = decode_run(body, query)
        chat = decode_run_body(run.inputs, path_model, self._catalog, self._limits, is_enveloped=False)
        options = run.options
        if options is None:
            return chat
        if isinstance(chat, EmbeddingsRequest):
            return msgspec.structs.replace(
                chat, options=options, rejects_if_busy=bool(options.reject_if_busy)
            )
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
