"""Causal grouped-query attention over the paged cache, and over contiguous keys and values."""

from __future__ import annotations

import torch
from torch import Tensor

from kernels.dispatch import takes_triton
from kernels.native import NativeLibrary, address
from kernels.paged_attention import reference


def paged_attention(
    query: Tensor,
    key_cache: Tensor,
    value_cache: Tensor,
    block_tables: Tensor,
    query_starts: Tensor,
    kv_lens: Tensor,
    scale: float,
    *,
    native: NativeLibrary | None = None,
) -> Tensor:
    """``softmax(scale * q k^T) v`` of a mixed batch of decodes and prefill chunks.

    Sequence ``s`` has the queries ``query_starts[s] .. query_starts[s+1]-1``; they are its last tokens, and
    the keys and values of all its ``kv_lens[s]`` tokens are in the cache already. Query ``i`` of ``n`` sees
    the keys ``0 .. kv_lens[s] - n + i``. Query head ``h`` reads KV head ``h * kv_heads // heads``.

    Args:
        query: ``[tokens, heads, head_dim]``; tokens may be strided.
        key_cache: ``[blocks, kv_heads, head_dim, block_size]``.
        value_cache: ``[blocks, kv_heads, block_size, value_dim]``.
        block_tables: ``[sequences, max_blocks]`` int32, contiguous.
        query_starts: ``[sequences + 1]`` int32.
        kv_lens: ``[sequences]`` int32.
        scale: what scores are multiplied by.

    Returns:
        ``[tokens, heads, value_dim]``, contiguous.

    Raises:
        ValueError: when shapes do not fit together; when the native form is given other tensors than float32
            ones on the CPU, a block size that is no multiple of 16, or a ``value_dim`` that is none of 32.
    """
    tokens, heads, dim = query.shape
    blocks, kv_heads, key_dim, block_size = key_cache.shape
    value_dim = value_cache.shape[3]
    if key_dim != dim or heads % kv_heads or value_cache.shape[:3] != (blocks, kv_heads, block_size):
        raise ValueError(
            f"caches {list(key_cache.shape)}, {list(value_cache.shape)} do not fit {list(query.shape)}"
        )
    if takes_triton("paged_attention", query):
        from kernels.paged_attention import kernel

        return kernel.paged_attention(
            query, key_cache, value_cache, block_tables, query_starts, kv_lens, scale
        )
    if native is None:
        return reference.paged_attention(
            query, key_cache, value_cache, block_tables, query_starts, kv_lens, scale
        )
    if block_size % 16 or value_dim % 32:
        raise ValueError(f"block_size {block_size} must be a multiple of 16, value_dim {value_dim} one of 32")
    sequences, max_blocks = block_tables.shape
    out = torch.empty((tokens, heads, value_dim))
    native.paged_attention(
        address("query", query, query.shape, strided_rows=True), query.stride(0),
        address("key_cache", key_cache, key_cache.shape), address("value_cache", value_cache,
        value_cache.shape), address("block_tables", block_tables, block_tables.shape, dtype=torch.int32),
        address("query_starts", query_starts, (sequences + 1,), dtype=torch.int32),
        address("kv_lens", kv_lens, (sequences,), dtype=torch.int32),
        scale, out.data_ptr(), sequences, max_blocks, heads, kv_heads, dim, value_dim, block_size,
    )  # fmt: skip
    return out


def causal_attention(query: Tensor, key: Tensor, value: Tensor, scale: float) -> Tensor:
    """``softmax(scale * q k^T) v`` of one sequence whose keys and values lie contiguously.

    The queries are the sequence's last tokens: query ``i`` of ``n`` sees the keys ``0 .. k - n + i``.

    Args:
        query: ``[n, heads, head_dim]``.
        key: ``[k, kv_heads, head_dim]`` with ``k >= n``.
        value: ``[k, kv_heads, value_dim]``.

    Returns:
        ``[n, heads, value_dim]``.
    """
    if takes_triton("paged_attention", query):
        from kernels.paged_attention import kernel

        return kernel.causal_attention(query, key, value, scale)
    return reference.causal_attention(query, key, value, scale)
