"""The decoder: embedding, layers, final norm, head."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor

from backend.engine.forward_batch import ForwardBatch
from backend.model.config import ModelConfig
from backend.model.context import LayerCache, StepContext
from backend.model.linear import Linear
from backend.model.placement import Placement
from backend.model.rope import RopeTable
from backend.model.vision import VisionTower
from kernels.rms_norm import add_rms_norm, rms_norm


class Attention(Protocol):
    """``[tokens, hidden]`` to the same, reading and extending the cache."""

    def new_cache(self, num_blocks: int, block_size: int) -> LayerCache: ...

    def __call__(self, x: Tensor, step: StepContext, cache: LayerCache) -> Tensor: ...


class TokenEmbedding(Protocol):
    """``[tokens]`` int64 to ``[tokens, hidden]``."""

    def __call__(self, token_ids: Tensor) -> Tensor: ...


class Mlp(Protocol):
    """``[tokens, hidden]`` to the same."""

    def __call__(self, x: Tensor) -> Tensor: ...


@dataclass(frozen=True, slots=True)
class DecoderLayer:
    """One pre-norm layer."""

    attention_norm: Tensor
    attention: Attention
    mlp_norm: Tensor
    mlp: Mlp


@dataclass(frozen=True, slots=True)
class Overlay:
    """Embeddings ``[M, hidden]`` that take the place of the tokens' own at ``rows`` ``[M]`` of a batch."""

    rows: Tensor
    embeddings: Tensor


@dataclass(frozen=True, slots=True)
class Transformer:
    """A loaded model. ``forward`` is a pure function of the batch and the cache, which it extends.

    ``vision`` is the tower that makes embeddings of images, None for a model that takes text only.
    ``takes_turns``: see :class:`backend.model.sharding.Sharding`.
    """

    config: ModelConfig
    placement: Placement
    embedding: TokenEmbedding
    layers: tuple[DecoderLayer, ...]
    norm: Tensor
    head: Linear
    rope_table: RopeTable
    vision: VisionTower | None = None
    takes_turns: bool = False

    def new_caches(self, num_blocks: int, block_size: int) -> tuple[LayerCache, ...]:
        """The paged KV cache of all layers, zeroed."""
        return tuple(layer.attention.new_cache(num_blocks, block_size) for layer in self.layers)

    def forward(
        self,
        batch: ForwardBatch,
        caches: Sequence[LayerCache],
        pause: Callable[[], None] = lambda: None,
        overlay: Overlay | None = None,
    ) -> Tensor:
        """Run one step.

        Args:
            overlay: what some placeholder tokens stand for.
            pause: called before every attention and every feed-forward part; may raise to end the step.

        Returns:
            Logits ``[rows, vocab]`` float32 of ``batch.logits_rows``. The KV of every token of the batch is
            in ``caches`` afterwards.
        """
        eps, native = self.config.rms_norm_eps, self.placement.native
        step = StepContext(batch, *self.rope_table.at(batch.positions))
        residual = self.embedding(batch.token_ids)
        if overlay is not None:
            residual.index_copy_(0, overlay.rows, overlay.embeddings)
        x = rms_norm(residual, self.layers[0].attention_norm, eps, native=native)
        following = [*(layer.attention_norm for layer in self.layers[1:]), self.norm]
        last = len(self.layers) - 1
        for index, (layer, cache) in enumerate(zip(self.layers, caches, strict=True)):
            pause()
            x = layer.attention(x, step, cache)
            if index == last:
                # Every token's KV is in the cache now; what follows is wanted for some tokens only.
                x, residual = (part.index_select(0, batch.logits_rows) for part in (x, residual))
                if not len(x) and not self.takes_turns:
                    return torch.empty((0, self.config.vocab_size), device=x.device)
            pause()
            x = layer.mlp(add_rms_norm(x, residual, layer.mlp_norm, eps, native=native))
            x = add_rms_norm(x, residual, following[index], eps, native=native)
        return self.head(x).float()

    def forward_nothing(self) -> None:
        """Take part in the exchanges of a step in which only others have tokens."""
        nothing = torch.empty(
            (0, self.config.hidden_size), dtype=self.placement.dtype, device=self.placement.device
        )
        for layer in self.layers:
            layer.mlp(nothing)
