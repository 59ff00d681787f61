"""``POST .../ai/v1/responses`` and ``/v1/responses``: OpenAI's Responses form, stateless."""

from __future__ import annotations

from collections.abc import Callable

from billing.usage import Surface
from gateway.errors import Refusal
from gateway.wire.openai import ChatRequest
from gateway.wire.responses import decode_responses, in_own_words


class ResponsesForm:
    """Every request brings an answer form of its own. ``encode_refusal`` makes the body of a refusal."""

    name: Surface = "v1"

    def __init__(self, encode_refusal: Callable[[Refusal, str], bytes]) -> None:
        self._encode_refusal = encode_refusal

    def decode(self, body: bytes, path_model: str | None, query: str) -> ChatRequest:
        return decode_responses(body)

    def completion(self, completion: bytes, usage: bytes) -> bytes:
        return completion  # written by the request's own form

    def stream_end(self, final_chunk: bytes, usage: bytes, *, includes_usage: bool) -> bytes:
        return b""  # written by the request's own form

    def refusal(self, refusal: Refusal, request_id: str) -> bytes:
        return self._encode_refusal(in_own_words(refusal), request_id)
