"""Triton forms of the permutation: a counting sort without atomics, so its order is always the same."""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from kernels.launching import Launcher, launch_now
from kernels.tiles import power_of_two

_COPIED = 2048
"""Elements of a row that a program moves."""


@triton.jit
def count_pairs(experts, counts, num_pairs, BLOCK: tl.constexpr):
    expert = tl.program_id(0)
    count = tl.zeros((BLOCK,), dtype=tl.int32)
    for begin in range(0, num_pairs, BLOCK):
        at = begin + tl.arange(0, BLOCK)
        count += (tl.load(experts + at, mask=at < num_pairs, other=-1) == expert).to(tl.int32)
    tl.store(counts + expert, tl.sum(count, 0))


@triton.jit
def place_pairs(
    experts, counts, starts, order, places, num_pairs,
    EXPERTS: tl.constexpr, BLOCK_EXPERTS: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    expert = tl.program_id(0)
    others = tl.arange(0, BLOCK_EXPERTS)
    count = tl.load(counts + others, mask=others < EXPERTS, other=0)
    place = tl.sum(tl.where(others < expert, count, 0), 0)
    tl.store(starts + expert, place)
    if expert == EXPERTS - 1:
        tl.store(starts + EXPERTS, tl.sum(count, 0))
    for begin in range(0, num_pairs, BLOCK):
        at = begin + tl.arange(0, BLOCK)
        is_ours = tl.load(experts + at, mask=at < num_pairs, other=-1) == expert
        ours = is_ours.to(tl.int32)
        to = place + tl.cumsum(ours, 0) - 1
        tl.store(order + to, at, mask=is_ours)
        tl.store(places + at, to, mask=is_ours)
        place += tl.sum(ours, 0)


@triton.jit
def gather_rows(x, order, out, stride, TOP_K: tl.constexpr, WIDTH: tl.constexpr, BLOCK: tl.constexpr):
    row = tl.program_id(0).to(tl.int64)
    at = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    token = (tl.load(order + row) // TOP_K).to(tl.int64)
    elements = tl.load(x + token * stride + at, mask=at < WIDTH)
    tl.store(out + row * WIDTH + at, elements, mask=at < WIDTH)


@triton.jit
def combine_rows(
    y, places, weights, out, TOP_K: tl.constexpr, WIDTH: tl.constexpr, BLOCK: tl.constexpr
):  # fmt: skip
    token = tl.program_id(0).to(tl.int64)
    at = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    total = tl.zeros((BLOCK,), dtype=tl.float32)
    for choice in range(TOP_K):
        row = tl.load(places + token * TOP_K + choice).to(tl.int64)
        weight = tl.load(weights + token * TOP_K + choice)
        total += weight * tl.load(y + row * WIDTH + at, mask=at < WIDTH, other=0.0).to(tl.float32)
    tl.store(out + token * WIDTH + at, total.to(out.dtype.element_ty), mask=at < WIDTH)


def sort_pairs(
    experts: Tensor, num_experts: int, *, launch: Launcher = launch_now
) -> tuple[Tensor, Tensor, Tensor]:
    """``order``, ``places`` and ``starts`` of :class:`kernels.moe_permute.Permutation`."""
    num_pairs, device = experts.numel(), experts.device
    order, places = (torch.empty(num_pairs, dtype=torch.int32, device=device) for _ in range(2))
    starts = torch.empty(num_experts + 1, dtype=torch.int32, device=device)
    counts = torch.empty(num_experts, dtype=torch.int32, device=device)
    pairs = experts.contiguous()
    block = min(1024, power_of_two(num_pairs, 16))
    launch(count_pairs, (num_experts,), experts=pairs, counts=counts, num_pairs=num_pairs, BLOCK=block)
    launch(
        place_pairs, (num_experts,),
        experts=pairs, counts=counts, starts=starts, order=order, places=places, num_pairs=num_pairs,
        EXPERTS=num_experts, BLOCK_EXPERTS=power_of_two(num_experts), BLOCK=block,
    )  # fmt: skip
    return order, places, starts


def gather(x: Tensor, order: Tensor, top_k: int, *, launch: Launcher = launch_now) -> Tensor:
    """Row ``order[i] // top_k`` of ``x`` at row ``i``."""
    width, block = x.shape[1], min(_COPIED, power_of_two(x.shape[1]))
    out = torch.empty((order.shape[0], width), dtype=x.dtype, device=x.device)
    launch(
        gather_rows, (order.shape[0], triton.cdiv(width, block)),
        x=x, order=order, out=out, stride=x.stride(0), TOP_K=top_k, WIDTH=width, BLOCK=block,
    )  # fmt: skip
    return out


def moe_unpermute(y: Tensor, places: Tensor, weights: Tensor, *, launch: Launcher = launch_now) -> Tensor:
    """See :func:`kernels.moe_permute.moe_unpermute`."""
    (tokens, top_k), width = weights.shape, y.shape[1]
    block = min(_COPIED, power_of_two(width))
    out = torch.empty((tokens, width), dtype=y.dtype, device=y.device)
    launch(
        combine_rows, (tokens, triton.cdiv(width, block)),
        y=y, places=places, weights=weights.contiguous(), out=out, TOP_K=top_k, WIDTH=width, BLOCK=block,
    )  # fmt: skip
    return out
