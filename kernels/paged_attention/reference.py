"""Plain torch forms of attention: gather the context, then scaled dot products."""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn.functional import scaled_dot_product_attention


def paged_attention(
    query: Tensor,
    key_cache: Tensor,
    value_cache: Tensor,
    block_tables: Tensor,
    query_starts: Tensor,
    kv_lens: Tensor,
    scale: float,
) -> Tensor:
    """See :func:`kernels.paged_attention.paged_attention`."""
    out = query.new_empty((*query.shape[:2], value_cache.shape[3]))
    starts, lengths = query_starts.tolist(), kv_lens.tolist()
    for sequence, length in enumerate(lengths):
        rows = slice(starts[sequence], starts[sequence + 1])
        key, value = gather(key_cache, value_cache, block_tables[sequence], length)
        out[rows] = causal_attention(query[rows], key, value, scale)
    return out


def gather(key_cache: Tensor, value_cache: Tensor, block_table: Tensor, length: int) -> tuple[Tensor, Tensor]:
    """The first ``length`` keys ``[length, kv_heads, head_dim]`` and values of one sequence, contiguous."""
    used = -(-length // key_cache.shape[3])
    blocks = block_table[:used].long()
    key = key_cache[blocks].permute(0, 3, 1, 2).flatten(0, 1)[:length]
    value = value_cache[blocks].transpose(1, 2).flatten(0, 1)[:length]
    return key, value


def causal_attention(query: Tensor, key: Tensor, value: Tensor, scale: float) -> Tensor:
    """See :func:`kernels.paged_attention.causal_attention`."""
    count, length = query.shape[0], key.shape[0]
    is_square = count == length
    mask = None
    if count > 1 and not is_square:
        mask = torch.ones((count, length), dtype=torch.bool, device=query.device).tril(length - count)
    out = scaled_dot_product_attention(
        query.transpose(0, 1)[None],
        key.transpose(0, 1)[None],
        value.transpose(0, 1)[None],
        attn_mask=mask,
        is_causal=is_square and count > 1,
        scale=scale,
        enable_gqa=query.shape[1] != key.shape[1],
    )
    return out[0].transpose(0, 1)
