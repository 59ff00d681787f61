"""Products of 8-bit floats with block scales, as DeepSeek-V3 and Kimi K2 store their weights."""

from __future__ import annotations

import torch
from torch import Tensor

from kernels.dispatch import takes_triton
from kernels.fp8_gemm import reference

BLOCK = reference.BLOCK
"""Columns of a row, and rows and columns of a weight, that share a scale."""


def quantise_rows(x: Tensor) -> tuple[Tensor, Tensor]:
    """Each row in groups of 128 columns as float8_e4m3fn, its largest value at the type's largest.

    Args:
        x: ``[rows, width]``; rows may be strided.

    Returns:
        ``[rows, width]`` float8_e4m3fn and scales ``[rows, ceil(width / 128)]`` float32, with ``x`` nearly
        values times scale.
    """
    dtype = torch.float8_e4m3fn
    largest = torch.finfo(dtype).max
    if takes_triton("fp8_gemm", x):
        from kernels.fp8_gemm import kernel

        return kernel.quantise_rows(x, dtype, largest)
    return reference.quantise_rows(x, dtype, largest)


def fp8_gemm(
    x: Tensor, x_scales: Tensor, weight: Tensor, weight_scales: Tensor, dtype: torch.dtype = torch.bfloat16
) -> Tensor:
    """``(x * x_scales) @ (weight * weight_scales).T``, summed in float32.

    Args:
        x: ``[rows, depth]`` float8_e4m3fn, contiguous.
        x_scales: ``[rows, ceil(depth / 128)]`` float32, contiguous.
        weight: ``[columns, depth]`` float8_e4m3fn, contiguous.
        weight_scales: ``[ceil(columns / 128), ceil(depth / 128)]`` float32, contiguous.
        dtype: of the result.

    Returns:
        ``[rows, columns]``.

    Raises:
        ValueError: when the shapes do not fit together.
    """
    (rows, depth), (columns, weight_depth) = x.shape, weight.shape
    groups = -(-depth // BLOCK)
    if weight_depth != depth or x_scales.shape != (rows, groups):
        raise ValueError(f"x {list(x.shape)} fits neither {list(weight.shape)} nor {list(x_scales.shape)}")
    if weight_scales.shape != (-(-columns // BLOCK), groups):
        raise ValueError(f"weight_scales {list(weight_scales.shape)} do not fit {list(weight.shape)}")
    if takes_triton("fp8_gemm", x):
        from kernels.fp8_gemm import kernel

        return kernel.fp8_gemm(x, x_scales, weight, weight_scales, dtype)
    return reference.fp8_gemm(x, x_scales, weight, weight_scales, dtype)
