"""Layers of which each rank computes a part."""

from __future__ import annotations

from dataclasses import replace

import torch
from torch import Tensor

from backend.model.config import ModelConfig, MoeConfig
from backend.model.context import LayerCache, StepContext
from backend.model.linear import Linear
from backend.model.mlp import DenseMlp, read_swiglu
from backend.model.moe import DenseExperts, Router
from backend.model.placement import Placement
from backend.model.transformer import Attention, Mlp, TokenEmbedding
from backend.model.weights import WeightReader
from backend.parallel.group import RankGroup, Span, split


class SummedAttention:
    """Attention over this rank's heads, summed over the tensor group."""

    def __init__(self, inner: Attention, group: RankGroup) -> None:
        self._inner = inner
        self._group = group

    def new_cache(self, num_blocks: int, block_size: int) -> LayerCache:
        return self._inner.new_cache(num_blocks, block_size)

    def __call__(self, x: Tensor, step: StepContext, cache: LayerCache) -> Tensor:
        return self._group.sum_over_tensor(self._inner(x, step, cache))


class SummedMlp:
    """A feed-forward layer over this rank's neurons, summed over the tensor group."""

    def __init__(self, inner: Mlp, group: RankGroup) -> None:
        self._inner = inner
        self._group = group

    def __call__(self, x: Tensor) -> Tensor:
        return self._group.sum_over_tensor(self._inner(x))


class VocabularyEmbedding:
    """Rows of this rank's tokens, zeros for the others', summed over the tensor group."""

    def __init__(self, inner: TokenEmbedding, vocabulary: Span, group: RankGroup) -> None:
        self._inner = inner
        self._vocabulary = vocabulary
        self._group = group

    def __call__(self, token_ids: Tensor) -> Tensor:
        local = token_ids - self._vocabulary.first
        is_own = (local >= 0) & (local < self._vocabulary.count)
        rows = self._inner(local.clamp(0, self._vocabulary.count - 1))
        return self._group.sum_over_tensor(rows * is_own.unsqueeze(1).to(rows.dtype))


class VocabularyHead:
    """Logits of this rank's tokens, put side by side with the others'."""

    def __init__(self, inner: Linear, vocabulary: Span, group: RankGroup) -> None:
        self._inner = inner
        self._vocabulary = vocabulary
        self._group = group
        self.out_features = vocabulary.total

    def __call__(self, x: Tensor) -> Tensor:
        own, tensor = self._inner(x), self._group.place.tensor
        counts = [split(self.out_features, tensor, index).count for index in range(tensor)]
        padded = torch.nn.functional.pad(own, (0, max(counts) - own.shape[1]))
        parts = self._group.gather_over_tensor(padded.contiguous())
        return torch.cat([part[:, :count] for part, count in zip(parts, counts, strict=True)], dim=1)


class ExpertLoads:
    """How many choices each rank of the expert group has computed, over all layers and steps."""

    def __init__(self, num_ranks: int) -> None:
        self.totals = [0] * num_ranks

    def add(self, received: list[int]) -> None:
        self.totals = [total + count for total, count in zip(self.totals, received, strict=True)]


class SharedOutExperts:
    """Mixture of experts whose experts are shared out over the expert group.

    Each rank routes its share of the tokens, sends every choice to the rank that has the expert, gets the
    results back and weighs them; a sum over the group puts the shares together. Where ranks have tokens of
    their own (``has_own_tokens``), all of them are its share and there is nothing to put together. Neurons of
    routed and shared experts are cut over the tensor group, which one more sum makes whole.
    """

    def __init__(
        self,
        config: ModelConfig,
        moe: MoeConfig,
        experts: Span,
        reader: WeightReader,
        prefix: str,
        placement: Placement,
        group: RankGroup,
        loads: ExpertLoads,
        has_own_tokens: bool = False,
    ) -> None:
        self._has_own_tokens = has_own_tokens
        self._router = Router(config, moe, reader, prefix, placement)
        own = range(experts.first, experts.first + experts.count)
        matrices = (
            read_swiglu(reader, f"{prefix}.experts.{expert}", config.hidden_size, moe.expert_dim)
            for expert in own
        )
        self._own = DenseExperts(matrices, config, replace(moe, num_experts=experts.count), placement)
        for expert in range(experts.total):
            if expert not in own:
                reader.ignore(f"{prefix}.experts.{expert}.")
        self._shared: DenseMlp | None = None
        if moe.shared_dim:
            shared = f"{prefix}.shared_experts"
            self._shared = DenseMlp(config.hidden_size, moe.shared_dim, reader, shared, placement)
        self._top_k = moe.num_experts_per_token
        self._experts, self._group, self._loads = experts, group, loads
        owners = [split(experts.total, group.place.expert, at) for at in range(group.place.expert)]
        counts = torch.tensor([span.count for span in owners])
        self._owner = torch.arange(len(owners)).repeat_interleave(counts).to(placement.device)

    def __call__(self, x: Tensor) -> Tensor:
        """``[tokens, hidden]`` to the same."""
        routed = self._dispatched(x) if self._group.place.expert > 1 else self._whole(x)
        if self._shared is not None:
            routed = routed + self._shared(x)
        return self._group.sum_over_tensor(routed)

    def _whole(self, x: Tensor) -> Tensor:
        return self._own(x, *self._router.choose(x))

    def _dispatched(self, x: Tensor) -> Tensor:
        place = self._group.place
        share = Span(0, len(x), len(x))
        if not self._has_own_tokens:
            share = split(len(x), place.expert, place.expert_rank)
        total = torch.zeros_like(x, dtype=torch.float32)
        tokens = slice(share.first, share.first + share.count)
        weights, experts = self._choose(x[tokens])
        chosen = experts.flatten().long()
        order = self._owner[chosen].argsort(stable=True)
        sent = torch.bincount(self._owner[chosen], minlength=place.expert)
        matrix = self._group.gather_counts(sent).cpu()
        self._loads.add(matrix.sum(dim=0).tolist())
        out, back = sent.tolist(), matrix[:, place.expert_rank].tolist()
        rows = self._group.exchange(x[tokens][order // self._top_k], out, back)
        ids = self._group.exchange(chosen[order], out, back) - self._experts.first
        ones = torch.ones((len(rows), 1), device=x.device)
        results = self._own(rows, ones, ids[:, None].int())
        returned = self._group.exchange(results, back, out).float()
        scale = weights.flatten()[order, None]
        total[tokens].index_add_(0, order // self._top_k, returned * scale)
        if not self._has_own_tokens:
            self._group.sum_over_expert(total)
        return total.to(x.dtype)

    def _choose(self, x: Tensor) -> tuple[Tensor, Tensor]:
        if len(x):
            return self._router.choose(x)
        empty = x.new_empty((0, self._top_k), dtype=torch.float32)  # more ranks than tokens
        return empty, empty.int()
