"""Batches for latent attention that tests and benchmarks share."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor


@dataclass(frozen=True, slots=True)
class MlaInputs:
    """The tensors of :func:`kernels.paged_mla.paged_mla_decode`, the cache poisoned outside the contexts."""

    query_latent: Tensor | None
    query_rope: Tensor
    cache: Tensor
    block_tables: Tensor
    kv_lens: Tensor
    scale: float


@dataclass(frozen=True, slots=True)
class MlaCase:
    """``part`` is what one head reads of the rope key, of which there are ``rope_groups`` parts."""

    name: str
    heads: int
    latent: int
    part: int
    rope_groups: int
    scores_latent: bool
    block_size: int
    lengths: tuple[int, ...]

    def inputs(self, seed: int = 0) -> MlaInputs:
        """Random inputs; blocks are dealt out shuffled, and all slots that hold no token are NaN."""
        rng = torch.Generator().manual_seed(seed)
        counts = [-(-length // self.block_size) for length in self.lengths]
        order = torch.randperm(sum(counts) + 2, generator=rng, dtype=torch.int32)
        tables = torch.zeros((len(counts), max(counts)), dtype=torch.int32)
        width = self.latent + self.part * self.rope_groups
        cache = torch.full((len(order), self.block_size, width), torch.nan)
        for row, (count, length) in enumerate(zip(counts, self.lengths, strict=True)):
            blocks, order = order[:count], order[count:]
            tables[row, :count] = blocks
            for place, block in enumerate(blocks.tolist()):
                used = min(self.block_size, length - place * self.block_size)
                cache[block, :used] = torch.randn((used, width), generator=rng)
        rope = torch.randn((len(counts), self.heads, self.part), generator=rng)
        latent = torch.randn((len(counts), self.heads, self.latent), generator=rng) * 0.1
        lengths = torch.tensor(self.lengths, dtype=torch.int32)
        scale = (self.part + self.scores_latent * self.latent) ** -0.5
        return MlaInputs(latent if self.scores_latent else None, rope, cache, tables, lengths, scale)


CASES = (
    MlaCase("one token", 9, 576, 64, 3, False, 16, (1,)),
    MlaCase("embedded", 9, 576, 64, 3, False, 16, (17, 300, 64, 15)),
    MlaCase("ordinary", 4, 64, 32, 1, True, 16, (5, 33, 130)),
    MlaCase("kimi heads", 8, 512, 64, 1, True, 16, (100, 7)),
    MlaCase("odd blocks", 5, 32, 32, 1, True, 7, (20, 7, 50)),
)
MEASURED = (
    MlaCase("embedded decode, 1 x 1,024", 9, 576, 64, 3, False, 16, (1024,)),
    MlaCase("embedded decode, 8 x 1,024", 9, 576, 64, 3, False, 16, (1024,) * 8),
)
