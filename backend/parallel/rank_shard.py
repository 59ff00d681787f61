"""The part of a model that one rank loads and computes."""

from __future__ import annotations

from backend.model.config import ModelConfig, MoeConfig
from backend.model.errors import UnsupportedModelError
from backend.model.linear import Linear
from backend.model.placement import Placement
from backend.model.transformer import Attention, Mlp, TokenEmbedding
from backend.model.weights import SliceSource, TensorSource, WeightReader
from backend.parallel.group import RankGroup
from backend.parallel.layers import (
    ExpertLoads,
    SharedOutExperts,
    SummedAttention,
    SummedMlp,
    VocabularyEmbedding,
    VocabularyHead,
)
from backend.parallel.shards import ModelPart, PartSource, localise, plan_part


class RankShard:
    """A :class:`backend.model.sharding.Sharding` among the ranks of a group; loads one model."""

    def __init__(self, group: RankGroup, *, takes_turns: bool = False) -> None:
        """``takes_turns``: each rank of the expert group has tokens of its own."""
        self.takes_turns = takes_turns
        self.loads = ExpertLoads(group.place.expert)
        self._group = group
        self._part: ModelPart | None = None

    def localise(self, config: ModelConfig, source: TensorSource) -> tuple[ModelConfig, TensorSource, int]:
        """See :class:`backend.model.sharding.Sharding`.

        Raises:
            UnsupportedModelError: when the model cannot be shared among so many ranks, or its file cannot be
                read in parts.
        """
        if not isinstance(source, SliceSource):
            raise UnsupportedModelError("parallel: only a directory with safetensors can be read in parts")
        self._part = plan_part(config, self._group.place)
        parts = PartSource(source, config, self._part)
        return localise(config, self._part), parts, self._part.vocabulary.count

    def join_attention(self, inner: Attention) -> Attention:
        return SummedAttention(inner, self._group)

    def join_mlp(self, inner: Mlp) -> Mlp:
        return SummedMlp(inner, self._group)

    def read_experts(
        self, config: ModelConfig, moe: MoeConfig, reader: WeightReader, prefix: str, placement: Placement
    ) -> Mlp:
        experts = self._known_part().experts
        return SharedOutExperts(
            config, moe, experts, reader, prefix, placement, self._group, self.loads, self.takes_turns
        )

    def join_ends(self, embedding: TokenEmbedding, head: Linear) -> tuple[TokenEmbedding, Linear]:
        vocabulary = self._known_part().vocabulary
        return (
            VocabularyEmbedding(embedding, vocabulary, self._group),
            VocabularyHead(head, vocabulary, self._group),
        )

    def _known_part(self) -> ModelPart:
        assert self._part is not None  # localise comes first
        return self._part
