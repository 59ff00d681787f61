"""``POST .../ai/v1/embeddings`` and ``/v1/embeddings``: OpenAI's form of embeddings."""

from __future__ import annotations

from collections.abc import Callable

from billing.usage import Surface
from gateway.errors import Refusal
from gateway.wire.embeddings import EmbeddingsRequest, decode_openai, openai_list


class EmbeddingsForm:
    """Bare OpenAI lists. ``encode_refusal`` makes the body of a refusal."""

    name: Surface = "v1"

    def __init__(self, max_inputs: int, encode_refusal: Callable[[Refusal, str], bytes]) -> None:
        self._max_inputs = max_inputs
        self._encode_refusal = encode_refusal

    def decode(self, body: bytes, path_model: str | None, query: str) -> EmbeddingsRequest:
        return decode_openai(body, max_inputs=self._max_inputs)

    def completion(self, completion: bytes, usage: bytes) -> bytes:
        return openai_list(completion, usage)

    def stream_end(self, final_chunk: bytes, usage: bytes, *, includes_usage: bool) -> bytes:
        return b""  # never a stream

    def refusal(self, refusal: Refusal, request_id: str) -> bytes:
        return self._encode_refusal(refusal, request_id)
