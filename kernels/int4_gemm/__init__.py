"""Products with weights of 4 bits, as compressed-tensors packs them; one for each expert."""

from __future__ import annotations

import torch
from torch import Tensor

from kernels.dispatch import takes_triton
from kernels.int4_gemm import reference


def int4_gemm(x: Tensor, packed: Tensor, scales: Tensor, starts: Tensor) -> Tensor:
    """``x[r] @ W[e].T`` for every row ``r`` of expert ``e``, ``W`` unpacked on the way, summed in float32.

    ``W = (nibble - 8) * scale``, rounded to ``x``'s dtype. Nibble ``i`` of a word (bits ``4i .. 4i+3``) is
    column ``8 * word + i``; a scale stands for a group of neighbouring columns.

    Args:
        x: ``[rows, depth]``, sorted by expert; rows may be strided.
        packed: ``[experts, columns, depth / 8]`` int32, contiguous.
        scales: ``[experts, columns, depth / group]``, contiguous; ``group`` is 32, or another power of two
            from 8 to 64.
        starts: ``[experts + 1]`` int32: expert ``e`` has the rows ``starts[e] .. starts[e+1]-1``.

    Returns:
        ``[rows, columns]`` of ``x``'s dtype.

    Raises:
        ValueError: when the shapes do not fit together or ``packed`` is not int32.
    """
    experts, columns, words = packed.shape
    depth, num_groups = x.shape[1], scales.shape[2]
    if (
        packed.dtype != torch.int32
        or scales.shape[:2] != (experts, columns)
        or starts.shape != (experts + 1,)
    ):
        raise ValueError(
            f"packed {packed.dtype} {list(packed.shape)}, scales {list(scales.shape)} and starts "
            f"{list(starts.shape)} do not fit together"
        )
    if words * 8 != depth or depth % num_groups or depth // num_groups not in (8, 16, 32, 64):
        raise ValueError(f"{words} words and {num_groups} scales do not fit rows of {depth}")
    if takes_triton("int4_gemm", x):
        from kernels.int4_gemm import kernel

        return kernel.int4_gemm(x, packed, scales, starts)
    return reference.int4_gemm(x, packed, scales, starts)
