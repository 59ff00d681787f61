"""Triton form of sampling: one program a row, the filters by bisection instead of a sort."""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from kernels.launching import Launcher, launch_now
from kernels.tiles import power_of_two

_CHUNK = 8192
"""Tokens that a program looks at together."""


@triton.jit
def _load_scores(logits, bitmask, at, VOCAB: tl.constexpr, HAS_MASK: tl.constexpr):
    inside = at < VOCAB
    score = tl.load(logits + at, mask=inside, other=float("-inf")).to(tl.float32)
    if HAS_MASK:
        word = tl.load(bitmask + at // 32, mask=inside, other=0)
        score = tl.where(((word >> (at % 32)) & 1) == 1, score, float("-inf"))
    return score


@triton.jit
def _find_best(logits, bitmask, VOCAB: tl.constexpr, CHUNK: tl.constexpr, HAS_MASK: tl.constexpr):
    """The highest score and the first token that has it; -1 where no token can be had."""
    step = tl.arange(0, CHUNK)
    highest = tl.full((), float("-inf"), dtype=tl.float32)
    best = tl.full((), VOCAB, dtype=tl.int32)
    is_broken = tl.full((), 0, dtype=tl.int32)
    for begin in range(0, VOCAB, CHUNK):
        score = _load_scores(logits, bitmask, begin + step, VOCAB, HAS_MASK)
        is_broken = tl.maximum(is_broken, tl.max((score != score).to(tl.int32), 0))
        peak = tl.max(score, 0)
        at = tl.min(tl.where(score == peak, begin + step, VOCAB), 0)
        best = tl.where(peak > highest, at, best)
        highest = tl.maximum(highest, peak)
    # Neither NaN, nor a mask that allows nothing, nor an infinite logit makes a token.
    is_broken = tl.where((highest == float("-inf")) | (highest == float("inf")), 1, is_broken)
    return highest, tl.where(is_broken == 1, -1, best)


@triton.jit
def _load_shares(shares, at, VOCAB: tl.constexpr):
    return tl.load(shares + at, mask=at < VOCAB, other=0.0)


@triton.jit
def _hold(shares, threshold, VOCAB: tl.constexpr, CHUNK: tl.constexpr):
    """How many shares reach ``threshold``, and their sum."""
    count = tl.full((), 0, dtype=tl.int32)
    mass = tl.full((), 0.0, dtype=tl.float32)
    for begin in range(0, VOCAB, CHUNK):
        share = _load_shares(shares, begin + tl.arange(0, CHUNK), VOCAB)
        count += tl.sum((share >= threshold).to(tl.int32), 0)
        mass += tl.sum(tl.where(share >= threshold, share, 0.0), 0)
    return count, mass


@triton.jit
def _floor_of_top_k(shares, floor_bits, top_k, VOCAB: tl.constexpr, CHUNK: tl.constexpr):
    """The highest floor that at least ``top_k`` shares reach.

    Shares are in 0..1, where the order of floats is the order of their bits.
    """
    low, high = floor_bits, tl.full((), 0x3F800001, dtype=tl.int32)
    while high - low > 1:
        middle = low + (high - low) // 2
        count, _ = _hold(shares, middle.to(tl.float32, bitcast=True), VOCAB, CHUNK)
        low = tl.where(count >= top_k, middle, low)
        high = tl.where(count >= top_k, high, middle)
    return low


@triton.jit
def _floor_of_top_p(shares, floor_bits, mass, top_p, VOCAB: tl.constexpr, CHUNK: tl.constexpr):
    """The highest floor whose shares sum up to ``top_p`` of ``mass``, and their sum."""
    limit = mass * top_p
    low, high = floor_bits, tl.full((), 0x3F800001, dtype=tl.int32)
    while high - low > 1:
        middle = low + (high - low) // 2
        _, held = _hold(shares, middle.to(tl.float32, bitcast=True), VOCAB, CHUNK)
        low = tl.where(held >= limit, middle, low)
        high = tl.where(held >= limit, high, middle)
        mass = tl.where(held >= limit, held, mass)
    return low, mass


@triton.jit
def _token_at(shares, floor, point, VOCAB: tl.constexpr, CHUNK: tl.constexpr):
    """The first token at which the kept shares sum up to more than ``point``; ``VOCAB`` where none does."""
    before = tl.full((), 0.0, dtype=tl.float32)
    found = tl.full((), VOCAB, dtype=tl.int32)
    for begin in range(0, VOCAB, CHUNK):
        at = begin + tl.arange(0, CHUNK)
        share = _load_shares(shares, at, VOCAB)
        kept = (share >= floor) & (at < VOCAB)
        reached = before + tl.cumsum(tl.where(kept, share, 0.0), 0)
        found = tl.minimum(found, tl.min(tl.where(kept & (reached > point), at, VOCAB), 0))
        before += tl.sum(tl.where(kept, share, 0.0), 0)
    return found


@triton.jit
def sample_rows(
    logits, bitmask, temperatures, top_ks, top_ps, min_ps, draws, tokens, shares,
    logits_stride, bitmask_stride,
    VOCAB: tl.constexpr, CHUNK: tl.constexpr, HAS_MASK: tl.constexpr, GREEDY_BELOW: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(0).to(tl.int64)
    logits += row * logits_stride
    bitmask += row * bitmask_stride
    shares += row * VOCAB
    highest, token = _find_best(logits, bitmask, VOCAB, CHUNK, HAS_MASK)
    temperature = tl.load(temperatures + row)
    if (temperature >= GREEDY_BELOW) & (token >= 0):
        for begin in range(0, VOCAB, CHUNK):
            at = begin + tl.arange(0, CHUNK)
            score = _load_scores(logits, bitmask, at, VOCAB, HAS_MASK)
            tl.store(shares + at, tl.exp((score - highest) / temperature), mask=at < VOCAB)
        tl.debug_barrier()
        floor = tl.load(min_ps + row)
        floor_bits = tl.maximum(floor, 1e-38).to(tl.int32, bitcast=True)
        top_k = tl.load(top_ks + row)
        if top_k > 0:
            floor_bits = _floor_of_top_k(shares, floor_bits, top_k, VOCAB, CHUNK)
        _, mass = _hold(shares, floor_bits.to(tl.float32, bitcast=True), VOCAB, CHUNK)
        top_p = tl.load(top_ps + row)
        if top_p < 1.0:
            floor_bits, mass = _floor_of_top_p(shares, floor_bits, mass, top_p, VOCAB, CHUNK)
        point = tl.load(draws + row) * mass
        found = _token_at(shares, floor_bits.to(tl.float32, bitcast=True), point, VOCAB, CHUNK)
        # Rounding may leave the point just past the last sum: the likeliest token is always kept.
        token = tl.where(found < VOCAB, found, token)
    tl.store(tokens + row, token)


def sample(
    logits: Tensor, temperatures: Tensor, draws: Tensor, bitmask: Tensor | None, top_ks: Tensor,
    top_ps: Tensor, min_ps: Tensor, greedy_below: float,
    *, chunk: int = _CHUNK, launch: Launcher = launch_now,
) -> Tensor:  # fmt: skip
    """See :func:`kernels.sample.sample`."""
    rows, vocab = logits.shape
    tokens = torch.empty(rows, dtype=torch.int32, device=logits.device)
    launch(
        sample_rows, (rows,), num_warps=16,
        logits=logits, bitmask=tokens if bitmask is None else bitmask, temperatures=temperatures,
        top_ks=top_ks, top_ps=top_ps, min_ps=min_ps, draws=draws, tokens=tokens,
        shares=torch.empty((rows, vocab), dtype=torch.float32, device=logits.device),
        logits_stride=logits.stride(0), bitmask_stride=0 if bitmask is None else bitmask.stride(0),
        VOCAB=vocab, CHUNK=min(chunk, power_of_two(vocab, 32)), HAS_MASK=bitmask is not None,
        GREEDY_BELOW=greedy_below,
    )  # fmt: skip
    return tokens
