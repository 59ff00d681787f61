"""Vectors as the OpenAI list of embeddings. Blocks for as long as there are many of them."""

from __future__ import annotations

import base64
from collections.abc import Sequence

import msgspec
import numpy as np

from backend.embeddings.encoder import Vector
from backend.wire import EncodingFormat, Pooling, TokenUsage

_DECIMALS = 8
"""Components of unit vectors: float32 has no more than these."""


class _Embedding(msgspec.Struct, frozen=True):
    object: str
    index: int
    embedding: list[float] | str


class _EmbeddingList(msgspec.Struct, frozen=True):
    object: str
    data: list[_Embedding]
    model: str
    dimensions: int
    pooling: Pooling
    usage: TokenUsage


def encode_embeddings(
    vectors: Sequence[Vector],
    *,
    model: str,
    pooling: Pooling,
    encoding_format: EncodingFormat,
    num_tokens: int,
) -> bytes:
    """``base64`` is that of little-endian float32, as clients of OpenAI decode it."""
    data = [
        _Embedding("embedding", index, _base64(vector) if encoding_format == "base64" else _floats(vector))
        for index, vector in enumerate(vectors)
    ]
    usage = TokenUsage.of(prompt=num_tokens, completion=0)
    return msgspec.json.encode(_EmbeddingList("list", data, model, len(vectors[0]), pooling, usage))


def _base64(vector: Vector) -> str:
    return base64.b64encode(vector.astype("<f4").tobytes()).decode()


def _floats(vector: Vector) -> list[float]:
    floats: list[float] = np.round(vector.astype(np.float64), _DECIMALS).tolist()
    return floats
