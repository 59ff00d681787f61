"""``POST /client/v4/accounts/{account}/ai/run/{model}``: the native surface."""

from __future__ import annotations

from billing.usage import Surface
from gateway.catalog import Catalog
from gateway.errors import Refusal
from gateway.wire.embeddings import EmbeddingsRequest
from gateway.wire.openai import DONE_FRAME, ChatRequest, frame, with_usage
from gateway.wire.run_body import RunLimits, decode_run_body
from gateway.wire.workers_ai import encode_refusal, envelop, native_tail


class NativeForm:
    """Enveloped JSON; streams end in a usage chunk and a native tail, whatever ``stream_options`` says."""

    name: Surface = "run"

    def __init__(self, catalog: Catalog, limits: RunLimits) -> None:
        self._catalog = catalog
        self._limits = limits

    def decode(self, body: bytes, path_model: str | None, query: str) -> ChatRequest | EmbeddingsRequest:
        return decode_run_body(body, path_model, self._catalog, self._limits, is_enveloped=True)

    def completion(self, completion: bytes, usage: bytes) -> bytes:
        return envelop(with_usage(completion, usage))

    def stream_end(self, final_chunk: bytes, usage: bytes, *, includes_usage: bool) -> bytes:
        return frame(with_usage(final_chunk, usage)) + native_tail(usage) + DONE_FRAME

    def refusal(self, refusal: Refusal, request_id: str) -> bytes:
        return encode_refusal(refusal, request_id)
