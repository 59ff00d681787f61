"""Triton form of the normalisation: one program a row, the row in registers."""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from kernels.launching import Launcher, launch_now
from kernels.tiles import power_of_two


@triton.jit
def rms_norm_rows(
    x, residual, weight, out, x_stride, residual_stride, eps,
    WIDTH: tl.constexpr, BLOCK: tl.constexpr, HAS_RESIDUAL: tl.constexpr, HAS_WEIGHT: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(0).to(tl.int64)
    at = tl.arange(0, BLOCK)
    inside = at < WIDTH
    value = tl.load(x + row * x_stride + at, mask=inside, other=0.0).to(tl.float32)
    if HAS_RESIDUAL:
        place = residual + row * residual_stride + at
        value += tl.load(place, mask=inside, other=0.0).to(tl.float32)
        # The sum is rounded as it is stored: the next layer adds to what the norm has seen.
        rounded = value.to(residual.dtype.element_ty)
        tl.store(place, rounded, mask=inside)
        value = rounded.to(tl.float32)
    mean = tl.sum(value * value, 0) / WIDTH
    value = value * tl.rsqrt(mean + eps)
    if HAS_WEIGHT:
        value = value * tl.load(weight + at, mask=inside, other=0.0).to(tl.float32)
    tl.store(out + row * WIDTH + at, value.to(out.dtype.element_ty), mask=inside)


def rms_norm(x: Tensor, weight: Tensor | None, eps: float, *, launch: Launcher = launch_now) -> Tensor:
    """See :func:`kernels.rms_norm.rms_norm`; rows may be strided."""
    return _norm(x, None, weight, eps, launch)


def add_rms_norm(
    x: Tensor, residual: Tensor, weight: Tensor | None, eps: float, *, launch: Launcher = launch_now
) -> Tensor:
    """See :func:`kernels.rms_norm.add_rms_norm`; rows may be strided."""
    return _norm(x, residual, weight, eps, launch)


def _norm(x: Tensor, residual: Tensor | None, weight: Tensor | None, eps: float, launch: Launcher) -> Tensor:
    rows, width = x.shape
    out = torch.empty((rows, width), dtype=x.dtype, device=x.device)
    block = power_of_two(width)
    launch(
        rms_norm_rows, (rows,), num_warps=min(16, max(1, block // 512)),
        x=x, residual=x if residual is None else residual, weight=x if weight is None else weight, out=out,
        x_stride=x.stride(0), residual_stride=0 if residual is None else residual.stride(0), eps=eps,
        WIDTH=width, BLOCK=block, HAS_RESIDUAL=residual is not None, HAS_WEIGHT=weight is not None,
    )  # fmt: skip
    return out
