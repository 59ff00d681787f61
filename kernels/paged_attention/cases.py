"""Mixed batches for attention that tests and benchmarks share."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor


@dataclass(frozen=True, slots=True)
class AttentionInputs:
    """The tensors of :func:`kernels.paged_attention.paged_attention`, caches poisoned outside the
    contexts."""

    query: Tensor
    key_cache: Tensor
    value_cache: Tensor
    block_tables: Tensor
    query_starts: Tensor
    kv_lens: Tensor
    scale: float


@dataclass(frozen=True, slots=True)
class AttentionCase:
    """``sequences`` are pairs (query tokens, tokens of context and queries together)."""

    name: str
    heads: int
    kv_heads: int
    dim: int
    value_dim: int
    block_size: int
    sequences: tuple[tuple[int, int], ...]

    def inputs(self, seed: int = 0) -> AttentionInputs:
        """Random inputs; blocks are dealt out shuffled, and all slots that hold no token are NaN."""
        rng = torch.Generator().manual_seed(seed)
        counts = [-(-length // self.block_size) for _, length in self.sequences]
        order = torch.randperm(sum(counts) + 2, generator=rng, dtype=torch.int32)
        tables = torch.zeros((len(counts), max(counts)), dtype=torch.int32)
        keys = torch.full((len(order), self.kv_heads, self.dim, self.block_size), torch.nan)
        values = torch.full((len(order), self.kv_heads, self.block_size, self.value_dim), torch.nan)
        for row, (count, (_, length)) in enumerate(zip(counts, self.sequences, strict=True)):
            blocks, order = order[:count], order[count:]
            tables[row, :count] = blocks
            for place, block in enumerate(blocks.tolist()):
                used = min(self.block_size, length - place * self.block_size)
                keys[block, :, :, :used] = torch.randn((self.kv_heads, self.dim, used), generator=rng)
                values[block, :, :used] = torch.randn((self.kv_heads, used, self.value_dim), generator=rng)
        query_lens = [count for count, _ in self.sequences]
        starts = torch.tensor([0, *query_lens], dtype=torch.int32).cumsum(0, dtype=torch.int32)
        query = torch.randn((sum(query_lens), self.heads, self.dim), generator=rng)
        lengths = torch.tensor([length for _, length in self.sequences], dtype=torch.int32)
        return AttentionInputs(query, keys, values, tables, starts, lengths, self.dim**-0.5)


CASES = (
    AttentionCase("one token", 9, 3, 64, 64, 16, ((1, 1),)),
    AttentionCase("decode", 9, 3, 64, 64, 16, ((1, 17), (1, 300), (1, 64), (1, 15))),
    AttentionCase("prefill", 9, 3, 64, 64, 16, ((37, 37),)),
    AttentionCase("chunk", 9, 3, 64, 64, 16, ((19, 140),)),
    AttentionCase("mixed", 9, 3, 64, 64, 16, ((1, 33), (1, 128), (5, 5), (21, 77))),
    AttentionCase("many heads a group", 8, 1, 32, 32, 32, ((1, 50), (9, 70))),
    AttentionCase("no groups", 4, 4, 48, 64, 16, ((1, 31), (12, 40))),
    AttentionCase("large blocks", 4, 2, 64, 96, 128, ((1, 200), (33, 260))),
)
MEASURED = (
    AttentionCase("smollm2 decode, 1 x 1,024", 9, 3, 64, 64, 16, ((1, 1024),)),
    AttentionCase("smollm2 decode, 8 x 1,024", 9, 3, 64, 64, 16, ((1, 1024),) * 8),
    AttentionCase("smollm2 prefill, 512", 9, 3, 64, 64, 16, ((512, 512),)),
    AttentionCase("smollm2 chunk, 512 of 2,048", 9, 3, 64, 64, 16, ((512, 2048),)),
)
