"""Offsets beyond 32 bits: blocks whose elements lie more than 2**31 floats into a cache.

The caches are address space that nothing is written to but the blocks in use, so they cost no memory.
"""

from __future__ import annotations

import pytest
import torch

from backend.model.lazy_memory import lazy_zeros
from kernels.native import NativeLibrary
from kernels.paged_attention import paged_attention
from kernels.paged_mla import gather_latent, paged_mla_decode
from kernels.store_kv import store_kv, store_latent
from tests.kernels.poison import assert_close

BLOCK_SIZE, WIDTH = 16, 576
NUM_BLOCKS = 2**31 // (BLOCK_SIZE * WIDTH) + 3
FAR = torch.tensor([[NUM_BLOCKS - 1, 1, NUM_BLOCKS - 2]], dtype=torch.int32)
NEAR = torch.tensor([[0, 2, 1]], dtype=torch.int32)
LENGTH = 40


def slots(table: torch.Tensor) -> torch.Tensor:
    at = torch.arange(LENGTH)
    return table[0].long()[at // BLOCK_SIZE] * BLOCK_SIZE + at % BLOCK_SIZE


@pytest.mark.parametrize("form", ["native", "reference"])
def test_latents_far_into_a_cache(form: str, native: NativeLibrary) -> None:
    chosen = native if form == "native" else None
    rows = torch.randn(LENGTH, WIDTH)
    query, rope = torch.randn(1, 4, 512), torch.randn(1, 4, 64)
    results = []
    for table, blocks in ((FAR, NUM_BLOCKS), (NEAR, 3)):
        cache = lazy_zeros((blocks, BLOCK_SIZE, WIDTH), torch.float32)
        store_latent(rows[:, :512], rows[:, 512:], cache, slots(table), native=chosen)
        assert torch.equal(gather_latent(cache, table[0], LENGTH), rows)
        lengths = torch.tensor([LENGTH], dtype=torch.int32)
        results.append(paged_mla_decode(query, rope, cache, table, lengths, 0.1, native=chosen))
    assert torch.equal(*results)


@pytest.mark.parametrize("form", ["native", "reference"])
@pytest.mark.parametrize("num_queries", [1, 9])
def test_keys_and_values_far_into_a_cache(form: str, num_queries: int, native: NativeLibrary) -> None:
    chosen = native if form == "native" else None
    heads, dim = 6, 96
    key, value = torch.randn(LENGTH, heads, dim), torch.randn(LENGTH, heads, dim)
    query = torch.randn(num_queries, heads, dim)
    starts, lengths = (torch.tensor(ints, dtype=torch.int32) for ints in ([0, num_queries], [LENGTH]))
    results = []
    for table, blocks in ((FAR, NUM_BLOCKS), (NEAR, 3)):
        keys = lazy_zeros((blocks, heads, dim, BLOCK_SIZE), torch.float32)
        values = lazy_zeros((blocks, heads, BLOCK_SIZE, dim), torch.float32)
        store_kv(key, value, keys, values, slots(table), native=chosen)
        results.append(paged_attention(query, keys, values, table, starts, lengths, 0.1, native=chosen))
    assert_close(*results)
