"""Bodies of ``/ai/run`` and the binding: what they may hold depends on what the model does."""

from __future__ import annotations

import msgspec

from gateway.catalog import Catalog
from gateway.config import EMBEDDINGS_TASK
from gateway.wire.embeddings import EmbeddingsRequest, decode_native
from gateway.wire.openai import ChatRequest, decode_chat


class RunLimits(msgspec.Struct, frozen=True):
    """Most choices of one chat, most texts of one request for embeddings."""

    max_choices: int
    max_embedding_inputs: int


class _Model(msgspec.Struct, frozen=True):
    model: str | None = None


_model_decoder = msgspec.json.Decoder(_Model)


def decode_run_body(
    raw: bytes, path_model: str | None, catalog: Catalog, limits: RunLimits, *, is_enveloped: bool
) -> ChatRequest | EmbeddingsRequest:
    """Decode a body for the model that the path names or, without one, the body.

    Raises:
        Refusal: 400, naming the one wrong field, or the model that there is not.
    """
    model = path_model or _model_of(raw)
    if model and catalog.find(model).task == EMBEDDINGS_TASK:
        return decode_native(
            raw,
            path_model=path_model,
            max_inputs=limits.max_embedding_inputs,
            is_enveloped=is_enveloped,
        )
    return decode_chat(raw, path_model=path_model, allows_prompt=True, max_choices=limits.max_choices)


def _model_of(raw: bytes) -> str | None:
    try:
        return _model_decoder.decode(raw).model
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError):
        return None  # the full decoding says what is wrong
