"""Plain torch form of the product with 4-bit weights."""

from __future__ import annotations

import torch
from torch import Tensor

from kernels.grouped_gemm import reference


def unpack(packed: Tensor, scales: Tensor, dtype: torch.dtype) -> Tensor:
    """The weights ``[experts, columns, depth]`` that are packed, rounded to ``dtype``."""
    shifts = torch.arange(0, 32, 4, dtype=torch.int32, device=packed.device)
    whole = (((packed[..., None] >> shifts) & 0xF) - 8).flatten(-2)
    size = whole.shape[-1] // scales.shape[-1]
    return (whole.float() * scales.float().repeat_interleave(size, dim=-1)).to(dtype)


def int4_gemm(x: Tensor, packed: Tensor, scales: Tensor, starts: Tensor) -> Tensor:
    """See :func:`kernels.int4_gemm.int4_gemm`."""
    return reference.grouped_gemm(x, unpack(packed, scales, x.dtype), starts)
