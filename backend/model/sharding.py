"""What loading asks of whoever holds only a part of a model (:mod:`backend.parallel`)."""

from __future__ import annotations

from typing import Protocol

from backend.model.config import ModelConfig, MoeConfig
from backend.model.linear import Linear
from backend.model.placement import Placement
from backend.model.transformer import Attention, Mlp, TokenEmbedding
from backend.model.weights import TensorSource, WeightReader


class Sharding(Protocol):
    """One rank's part: layers are built as if it were the whole model, and then joined with the others'."""

    @property
    def takes_turns(self) -> bool:
        """Whether others compute with other tokens, so that every layer is visited even for no token."""
        ...

    def localise(self, config: ModelConfig, source: TensorSource) -> tuple[ModelConfig, TensorSource, int]:
        """The part's shape, its weights, and how many rows of the vocabulary it has."""
        ...

    def join_attention(self, inner: Attention) -> Attention: ...

    def join_mlp(self, inner: Mlp) -> Mlp: ...

    def read_experts(
        self, config: ModelConfig, moe: MoeConfig, reader: WeightReader, prefix: str, placement: Placement
    ) -> Mlp: ...

    def join_ends(self, embedding: TokenEmbedding, head: Linear) -> tuple[TokenEmbedding, Linear]: ...
