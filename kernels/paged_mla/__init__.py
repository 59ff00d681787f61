"""Multi-head latent attention over the paged latent cache: absorbed decode, and the gather for prefill.

The cache holds per token a latent ``c`` and a rotated rope key (``[blocks, block_size, latent + rope]``).
Decode never expands it: queries come already multiplied by ``W_UK`` and the result is a weighted sum of
latents, which the caller multiplies by ``W_UV`` (DeepSeek-V2, section 2.1). Prefill gathers the context,
lets the caller expand it and runs :func:`kernels.paged_attention.causal_attention`.
"""

from __future__ import annotations

import torch
from torch import Tensor

from kernels.dispatch import takes_triton
from kernels.native import NativeLibrary, address
from kernels.paged_mla import reference


def paged_mla_decode(
    query_latent: Tensor | None,
    query_rope: Tensor,
    cache: Tensor,
    block_tables: Tensor,
    kv_lens: Tensor,
    scale: float,
    *,
    rope_groups: int = 1,
    native: NativeLibrary | None = None,
) -> Tensor:
    """``sum_j softmax_j(scale * (q_latent . c_j + q_rope . k_j)) c_j`` for one query token per sequence.

    Args:
        query_latent: ``[sequences, heads, latent]``; None where the model has no part of its scores in the
            latent (``qk_nope_head_dim`` 0), which are then left out.
        query_rope: ``[sequences, heads, rope / rope_groups]``; sequences may be strided.
        cache: ``[blocks, block_size, latent + rope]``.
        block_tables: ``[sequences, max_blocks]`` int32, contiguous.
        kv_lens: ``[sequences]`` int32, the tokens that the query sees, itself included.
        scale: what scores are multiplied by.
        rope_groups: the rope key is cut into so many parts and head ``h`` reads part
            ``h * rope_groups // heads`` only; 1 is ordinary MLA.

    Returns:
        ``[sequences, heads, latent]``, contiguous.

    Raises:
        ValueError: when shapes do not fit together, or the native form is given other tensors than float32
            ones on the CPU or widths (latent, part of the rope key) that are no multiples of 32.
    """
    sequences, heads, part = query_rope.shape
    _, block_size, width = cache.shape
    latent = width - part * rope_groups
    if latent <= 0 or heads % rope_groups:
        raise ValueError(f"a cache of width {width} does not fit {rope_groups} rope groups of {part}")
    if query_latent is not None and query_latent.shape != (sequences, heads, latent):
        raise ValueError(f"query_latent must be {[sequences, heads, latent]}, not {list(query_latent.shape)}")
    if takes_triton("paged_mla", query_rope):
        from kernels.paged_mla import kernel

        return kernel.paged_mla_decode(
            query_latent, query_rope, cache, block_tables, kv_lens, scale, rope_groups=rope_groups
        )
    if native is None:
        return reference.paged_mla_decode(
            query_latent, query_rope, cache, block_tables, kv_lens, scale, rope_groups=rope_groups
        )
    if latent % 32 or part % 32:
        raise ValueError(f"latent {latent} and the part of the rope key {part} must be multiples of 32")
    out = torch.empty((sequences, heads, latent))
    native.paged_mla_decode(
        address("query_latent", query_latent, (sequences, heads, latent)),
        address("query_rope", query_rope, query_rope.shape, strided_rows=True), query_rope.stride(0),
        address("cache", cache, cache.shape),
        address("block_tables", block_tables, block_tables.shape, dtype=torch.int32),
        address("kv_lens", kv_lens, (sequences,), dtype=torch.int32),
        scale, out.data_ptr(), sequences, block_tables.shape[1], heads, latent, part, rope_groups, block_size,
    )  # fmt: skip
    return out


def gather_latent(cache: Tensor, block_table: Tensor, length: int) -> Tensor:
    """The first ``length`` rows ``[length, latent + rope]`` of one sequence, contiguous, for expansion in
    prefill.

    ``block_table`` is ``[max_blocks]`` int32; its first ``ceil(length / block_size)`` entries are read.
    """
    if takes_triton("paged_mla", cache):
        from kernels.paged_mla import kernel

        return kernel.gather_latent(cache, block_table, length)
    return reference.gather_latent(cache, block_table, length)
