"""Plain torch forms of the 8-bit product."""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn.functional import pad

BLOCK = 128


def quantise_rows(x: Tensor, dtype: torch.dtype, largest: float) -> tuple[Tensor, Tensor]:
    """See :func:`kernels.fp8_gemm.quantise_rows`."""
    grouped = pad(x.float(), (0, -x.shape[1] % BLOCK)).view(x.shape[0], -1, BLOCK)
    scales = grouped.abs().amax(-1).clamp(min=1e-10) / largest
    return (grouped / scales[..., None]).flatten(1)[:, : x.shape[1]].to(dtype), scales


def fp8_gemm(
    x: Tensor, x_scales: Tensor, weight: Tensor, weight_scales: Tensor, dtype: torch.dtype
) -> Tensor:
    """See :func:`kernels.fp8_gemm.fp8_gemm`."""
    columns, depth = weight.shape
    per_element = weight_scales.repeat_interleave(BLOCK, 0)[:columns].repeat_interleave(BLOCK, 1)[:, :depth]
    left = x.float() * x_scales.repeat_interleave(BLOCK, 1)[:, :depth]
    return (left @ (weight.float() * per_element).T).to(dtype)
