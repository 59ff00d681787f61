"""Which part of a model a rank has, and a source of weights that reads that part only.

Attention is cut between heads (between groups of heads where these share keys), feed-forward layers and
experts between neurons, the embedding and the head between tokens of the vocabulary; latents, norms and
routers are whole everywhere. Layers are built as if the rank's part were the whole model.
"""

from __future__ import annotations

import re
from collections.abc import Collection
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from backend.model.config import ModelConfig, MoeConfig
from backend.model.errors import ModelLoadError, UnsupportedModelError
from backend.model.quant import GROUP_SIZE
from backend.model.weights import SliceSource
from backend.parallel.group import RankPlace, Span, split

_PARTS = re.compile(r"_(packed|scale|min|scale_inv|shape)$")
_FP8_BLOCK = 128


@dataclass(frozen=True, slots=True)
class ModelPart:
    """What a rank has of a model: ``heads``, ``key_groups`` (KV heads, or heads of rotated keys), neurons of
    the ``dense``, ``expert`` and ``shared`` layers, ``vocabulary``, and whole ``experts``."""

    heads: Span
    key_groups: Span
    dense: Span
    expert: Span
    shared: Span
    vocabulary: Span
    experts: Span


def plan_part(config: ModelConfig, place: RankPlace) -> ModelPart:
    """Decide what a rank has.

    Raises:
        UnsupportedModelError: when the model has fewer heads or experts than there are ranks for them.
    """
    mla, moe = config.mla, config.moe
    num_groups = config.num_kv_heads if mla is None else mla.rope_groups
    num_units = num_groups if mla is None or num_groups > 1 else config.num_heads
    if num_units < place.tensor:
        raise UnsupportedModelError(
            f"parallel.tensor: {place.tensor} ranks cannot share {num_units} groups of heads"
        )
    if place.expert > 1 and (moe is None or moe.num_experts < place.expert):
        raise UnsupportedModelError(
            f"parallel.expert: {place.expert} ranks cannot share {moe.num_experts if moe else 0} experts"
        )
    units = split(num_units, place.tensor, place.tensor_rank)
    is_cut = num_units == num_groups
    return ModelPart(
        heads=units.times(config.num_heads // num_units),
        key_groups=units if is_cut else Span(0, num_groups, num_groups),
        dense=_neurons(config.intermediate_size, place),
        expert=_neurons(moe.expert_dim if moe else 0, place),
        shared=_neurons(moe.shared_dim if moe else 0, place),
        vocabulary=split(config.vocab_size, place.tensor, place.tensor_rank),
        experts=split(moe.num_experts if moe else 0, place.expert, place.expert_rank),
    )


def localise(config: ModelConfig, part: ModelPart) -> ModelConfig:
    """The shape of the part as a model of its own; the vocabulary stays whole."""
    mla, moe = config.mla, config.moe
    return replace(
        config,
        num_heads=part.heads.count,
        num_kv_heads=part.key_groups.count if mla is None else config.num_kv_heads,
        intermediate_size=part.dense.count,
        mla=None if mla is None else replace(mla, rope_groups=part.key_groups.count),
        moe=None if moe is None else _local_moe(moe, part),
    )


def _local_moe(moe: MoeConfig, part: ModelPart) -> MoeConfig:
    return replace(moe, expert_dim=part.expert.count, shared_dim=part.shared.count)


def _neurons(total: int, place: RankPlace) -> Span:
    """A part of a layer's neurons, between groups of quantised numbers where there are enough of them."""
    unit = GROUP_SIZE if total % GROUP_SIZE == 0 and total // GROUP_SIZE >= place.tensor else 1
    return split(total // unit, place.tensor, place.tensor_rank).times(unit)


class PartSource:
    """The tensors of one rank's part, read as parts.

    Raises:
        ModelLoadError: when a quantised tensor cannot be cut where the part ends.
    """

    def __init__(self, source: SliceSource, config: ModelConfig, part: ModelPart) -> None:
        self._source = source
        self._config = config
        self._part = part

    @property
    def names(self) -> Collection[str]:
        return self._source.names

    def place_of(self, name: str) -> str:
        return self._source.place_of(name)

    def read(self, name: str) -> Tensor:
        matrix, suffix = self._split_name(name)
        if matrix.endswith(".kv_a_proj_with_mqa.weight"):
            return self._read_latent(name)
        cut = self._cut_of(matrix)
        if cut is None:
            return self._source.read(name)
        dim, span = cut
        if suffix == "shape":
            shape = self._source.read(name).clone()
            shape[dim] = span.count
            return shape
        return self._read_span(name, dim, span, suffix)

    def _split_name(self, name: str) -> tuple[str, str]:
        found = _PARTS.search(name)
        return (name, "") if found is None else (name[: found.start()], found[1])

    def _cut_of(self, matrix: str) -> tuple[int, Span] | None:
        """The dimension that a matrix is cut in, and where; None for what is whole everywhere."""
        config, part, mla = self._config, self._part, self._config.mla
        if matrix in ("model.embed_tokens.weight", "lm_head.weight"):
            return 0, part.vocabulary
        if not matrix.endswith("_proj.weight"):
            return None
        kind = matrix.removesuffix("_proj.weight").rsplit(".", 1)[1]
        head = config.head_dim if mla is None else mla.qk_dim
        if kind in ("q", "q_b"):
            return 0, part.heads.times(head)
        if kind in ("k", "v"):
            return 0, part.key_groups.times(config.head_dim)
        if kind == "kv_b" and mla is not None:
            return 0, part.heads.times(mla.nope_dim + mla.v_dim)
        if kind == "o":
            return 1, part.heads.times(config.head_dim if mla is None else mla.v_dim)
        if kind in ("gate", "up", "down"):
            return (1 if kind == "down" else 0), self._neurons_of(matrix)
        return None

    def _neurons_of(self, matrix: str) -> Span:
        if ".shared_experts." in matrix:
            return self._part.shared
        return self._part.expert if ".experts." in matrix else self._part.dense

    def _read_latent(self, name: str) -> Tensor:
        """The latent's rows, whole, and the rotated keys that this rank's heads read."""
        mla = self._config.mla
        if mla is None or self._part.key_groups.count == mla.rope_groups:
            return self._source.read(name)
        _, suffix = self._split_name(name)
        latent = mla.kv_lora_rank if mla.has_kv_a else 0
        keys = self._part.key_groups.times(mla.rope_dim)
        if suffix == "shape":
            shape = self._source.read(name).clone()
            shape[0] = latent + keys.count
            return shape
        if suffix == "scale_inv":
            raise ModelLoadError(f"{self.place_of(name)}: fp8 cannot be cut between rotated keys")
        start = latent + keys.first
        rows = self._source.read_part(name, 0, start, start + keys.count)
        return torch.cat((self._source.read_part(name, 0, 0, latent), rows)) if latent else rows

    def _read_span(self, name: str, dim: int, span: Span, suffix: str) -> Tensor:
        shape = self._source.shape_of(name)
        length = shape[dim] if dim < len(shape) else 0
        if suffix == "scale_inv":
            numerator, denominator = 1, _FP8_BLOCK
        else:
            numerator, denominator = length, span.total
        start, end = span.first * numerator, (span.first + span.count) * numerator
        is_last = span.first + span.count == span.total
        if start % denominator or (end % denominator and not is_last):
            raise ModelLoadError(
                f"{self.place_of(name)}: cannot be cut at {span.first}..{span.first + span.count} of "
                f"{span.total}: that is within a group of quantised numbers"
            )
        stop = length if is_last else end // denominator
        return self._source.read_part(name, dim, start // denominator, stop)
