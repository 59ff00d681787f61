"""The decoder: embedding, layers, final norm, head."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor

from backend.engine.forward_batch import ForwardBatch
from backend.model.config import ModelConfig
from backend.model.context import LayerCache, StepContext
from backend.model.linear import Embedding, Linear
from backend.model.placement import Placement
from backend.model.rope import RopeTable
from kernels.rms_norm import rms_norm


class Attention(Protocol):
    """Adds its output to the residual stream, and its keys and values to the cache."""

    def new_cache(self, num_blocks: int, block_size: int) -> LayerCache: ...

    def add_to(self, residual: Tensor, x: Tensor, step: StepContext, cache: LayerCache) -> None: ...


class Mlp(Protocol):
    """Adds its output to the residual stream."""

    def add_to(self, residual: Tensor, x: Tensor) -> None: ...


@dataclass(frozen=True, slots=True)
class DecoderLayer:
    """One pre-norm layer."""

    attention_norm: Tensor
    attention: Attention
    mlp_norm: Tensor
    mlp: Mlp


@dataclass(frozen=True, slots=True)
class Transformer:
    """A loaded model. ``forward`` is a pure function of the batch and the cache, which it extends."""

    config: ModelConfig
    placement: Placement
    embedding: Embedding
    layers: tuple[DecoderLayer, ...]
    norm: Tensor
    head: Linear
    rope_table: RopeTable

    def new_caches(self, num_blocks: int, block_size: int) -> tuple[LayerCache, ...]:
        """The paged KV cache of all layers, zeroed."""
        return tuple(layer.attention.new_cache(num_blocks, block_size) for layer in self.layers)

    def forward(self, batch: ForwardBatch, caches: Sequence[LayerCache]) -> Tensor:
        """Run one step.

        Returns:
            Logits ``[rows, vocab]`` float32 of ``batch.logits_rows``. The KV of every token of the batch is in
            ``caches`` afterwards.
        """
        eps, native = self.config.rms_norm_eps, self.placement.native
        cos, sin = self.rope_table.at(batch.positions)
        step = StepContext(batch, cos, sin)
        x = self.embedding(batch.token_ids)
        for layer, cache in zip(self.layers, caches, strict=True):
            layer.attention.add_to(x, rms_norm(x, layer.attention_norm, eps, native=native), step, cache)
            layer.mlp.add_to(x, rms_norm(x, layer.mlp_norm, eps, native=native))
        wanted = rms_norm(x.index_select(0, batch.logits_rows), self.norm, eps, native=native)
        if not len(wanted):
            return torch.empty((0, self.config.vocab_size), device=x.device)
        return self.head(wanted).float()
