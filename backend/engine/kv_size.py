"""How large the KV cache is to be."""

from __future__ import annotations

import math

from backend.config import CacheConfig

_GIB = 1 << 30


def choose_num_blocks(
    cache: CacheConfig,
    kv_bytes_per_token: int,
    max_model_len: int,
    kv_memory_bytes: int,
    memory_bytes: int | None = None,
) -> int:
    """How many KV blocks to allocate; ``kv_memory_bytes`` is the device's share when nothing is configured,
    ``memory_bytes`` all that it has.

    Raises:
        ValueError: when they could not hold one sequence of ``max_model_len`` tokens, or not be had; the
            message says which setting to change and to what.
    """
    if cache.memory_gib is not None and not 0 < cache.memory_gib < math.inf:
        raise ValueError(f"cache.memory_gib: must be a number over 0, not {cache.memory_gib:g}")
    num_blocks = _count_blocks(cache, kv_bytes_per_token, max_model_len, kv_memory_bytes)
    num_bytes = num_blocks * cache.block_size * kv_bytes_per_token
    if memory_bytes is not None and num_bytes > memory_bytes:
        key = "memory_gib" if cache.num_blocks is None else "num_blocks"
        raise ValueError(
            f"cache.{key}: a KV cache of {num_bytes / _GIB:,.1f} GiB is more than the "
            f"{memory_bytes / _GIB:,.1f} GiB of this device; set it lower, or to null for a share of them"
        )
    return num_blocks


def _count_blocks(
    cache: CacheConfig, kv_bytes_per_token: int, max_model_len: int, kv_memory_bytes: int
) -> int:
    if cache.block_size < 1:
        raise ValueError(f"cache.block_size: must be at least 1, not {cache.block_size}")
    block_bytes = cache.block_size * kv_bytes_per_token
    least = -(-max_model_len // cache.block_size)
    if cache.num_blocks is not None:
        if cache.num_blocks < least:
            raise ValueError(
                f"cache.num_blocks: {cache.num_blocks} blocks of {cache.block_size} tokens cannot hold one "
                f"sequence of model.max_model_len {max_model_len}; set it to {least} or more, or lower "
                f"max_model_len"
            )
        return cache.num_blocks
    memory_gib = kv_memory_bytes / _GIB if cache.memory_gib is None else cache.memory_gib
    num_blocks = int(memory_gib * _GIB) // block_bytes
    if num_blocks < least:
        needed_gib = math.ceil(least * block_bytes / _GIB * 1000) / 1000
        raise ValueError(
            f"cache.memory_gib: {memory_gib:.3g} GiB cannot hold one sequence of model.max_model_len "
            f"{max_model_len} at {kv_bytes_per_token} bytes a token; set it to {needed_gib:g} or more, or "
            f"lower max_model_len"
        )
    return num_blocks
