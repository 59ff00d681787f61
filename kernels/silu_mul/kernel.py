"""Triton form of SwiGLU's gate."""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from kernels.launching import Launcher, launch_now
from kernels.tiles import power_of_two


@triton.jit
def gate_rows(gate_up, out, stride, WIDTH: tl.constexpr, BLOCK: tl.constexpr):
    row = tl.program_id(0).to(tl.int64)
    at = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    inside = at < WIDTH
    gate = tl.load(gate_up + row * stride + at, mask=inside, other=0.0).to(tl.float32)
    up = tl.load(gate_up + row * stride + WIDTH + at, mask=inside, other=0.0).to(tl.float32)
    value = gate / (1.0 + tl.exp(-gate)) * up
    tl.store(out + row * WIDTH + at, value.to(out.dtype.element_ty), mask=inside)


def silu_mul(gate_up: Tensor, *, launch: Launcher = launch_now) -> Tensor:
    """See :func:`kernels.silu_mul.silu_mul`; rows may be strided."""
    rows, twice = gate_up.shape
    width = twice // 2
    out = torch.empty((rows, width), dtype=gate_up.dtype, device=gate_up.device)
    block = min(2048, power_of_two(width))
    launch(
        gate_rows, (rows, triton.cdiv(width, block)), num_warps=4,
        gate_up=gate_up, out=out, stride=gate_up.stride(0), WIDTH=width, BLOCK=block,
    )  # fmt: skip
    return out
