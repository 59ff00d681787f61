"""Plain torch forms of absorbed latent attention."""

from __future__ import annotations

import torch
from torch import Tensor


def paged_mla_decode(
    query_latent: Tensor | None,
    query_rope: Tensor,
    cache: Tensor,
    block_tables: Tensor,
    kv_lens: Tensor,
    scale: float,
    *,
    rope_groups: int = 1,
) -> Tensor:
    """See :func:`kernels.paged_mla.paged_mla_decode`."""
    sequences, heads, part = query_rope.shape
    latent_width = cache.shape[2] - part * rope_groups
    out = query_rope.new_empty((sequences, heads, latent_width))
    for sequence, length in enumerate(kv_lens.tolist()):
        rows = gather_latent(cache, block_tables[sequence], length)
        latent = rows[:, :latent_width]
        keys = rows[:, latent_width:].view(length, rope_groups, part)
        grouped = query_rope[sequence].reshape(rope_groups, heads // rope_groups, part)
        scores = torch.einsum("ghp,tgp->ght", grouped, keys).reshape(heads, length)
        if query_latent is not None:
            scores = scores + query_latent[sequence] @ latent.T
        out[sequence] = torch.softmax(scores * scale, dim=-1) @ latent
    return out


def gather_latent(cache: Tensor, block_table: Tensor, length: int) -> Tensor:
    """See :func:`kernels.paged_mla.gather_latent`."""
    used = -(-length // cache.shape[1])
    return cache[block_table[:used].long()].flatten(0, 1)[:length]
