"""Triton form of the rotation: one program a token and some of its heads."""

from __future__ import annotations

import triton
import triton.language as tl
from torch import Tensor

from kernels.launching import Launcher, launch_now
from kernels.tiles import power_of_two


@triton.jit
def rotate(
    x, cos, sin, token_stride, head_stride,
    HEADS: tl.constexpr, HALF: tl.constexpr, BLOCK_HEADS: tl.constexpr, BLOCK_HALF: tl.constexpr,
    INTERLEAVED: tl.constexpr,
):  # fmt: skip
    token = tl.program_id(0).to(tl.int64)
    heads = tl.program_id(1) * BLOCK_HEADS + tl.arange(0, BLOCK_HEADS)
    pairs = tl.arange(0, BLOCK_HALF)
    is_pair = pairs < HALF
    cosine = tl.load(cos + token * HALF + pairs, mask=is_pair, other=0.0)[None, :]
    sine = tl.load(sin + token * HALF + pairs, mask=is_pair, other=0.0)[None, :]
    if INTERLEAVED:
        first_at, gap = 2 * pairs, 1
    else:
        first_at, gap = pairs, HALF
    place = x + token * token_stride + heads.to(tl.int64)[:, None] * head_stride + first_at[None, :]
    inside = (heads < HEADS)[:, None] & is_pair[None, :]
    first = tl.load(place, mask=inside, other=0.0).to(tl.float32)
    second = tl.load(place + gap, mask=inside, other=0.0).to(tl.float32)
    tl.store(place, (first * cosine - second * sine).to(x.dtype.element_ty), mask=inside)
    tl.store(place + gap, (first * sine + second * cosine).to(x.dtype.element_ty), mask=inside)


def rope(x: Tensor, cos: Tensor, sin: Tensor, *, interleaved: bool, launch: Launcher = launch_now) -> None:
    """See :func:`kernels.rope.rope`; heads may be strided too."""
    tokens, heads, dim = x.shape
    block_half = power_of_two(dim // 2)
    block_heads = min(power_of_two(heads), max(1, 1024 // block_half))
    launch(
        rotate, (tokens, triton.cdiv(heads, block_heads)),
        num_warps=4 if block_heads * block_half >= 512 else 1,
        x=x, cos=cos.contiguous(), sin=sin.contiguous(), token_stride=x.stride(0), head_stride=x.stride(1),
        HEADS=heads, HALF=dim // 2, BLOCK_HEADS=block_heads, BLOCK_HALF=block_half, INTERLEAVED=interleaved,
    )  # fmt: skip
