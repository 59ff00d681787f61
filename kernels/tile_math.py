"""Pieces that several Triton kernels are made of."""

from __future__ import annotations

import triton
import triton.language as tl


@triton.jit
def dot(a, b, WIDEN_DOT: tl.constexpr):
    """``a @ b`` in float32; ``WIDEN_DOT`` widens the operands first, for Triton's interpreter."""
    if WIDEN_DOT:
        a = a.to(tl.float32)
        b = b.to(tl.float32)
    return tl.dot(a, b, input_precision="ieee")


@triton.jit
def find_tile(starts, tile, NUM_PARTS: tl.constexpr, PARTS: tl.constexpr, ROWS: tl.constexpr):
    """The part that tile number ``tile`` belongs to and its first row, when every part has its own tiles.

    Part ``p`` has the rows ``starts[p] .. starts[p+1]-1``; its tiles are numbered from
    ``starts[p] // ROWS + p``, which leaves room for all of them, so that nobody needs to know the sizes
    before the launch. Surplus tiles begin at or past the end of their part. ``PARTS`` is ``NUM_PARTS``
    rounded up to a power of two. Gives the part, its bounds and the tile's first row.
    """
    parts = tl.arange(0, PARTS)
    first = tl.load(starts + parts, mask=parts < NUM_PARTS, other=0) // ROWS + parts
    part = tl.sum(((first <= tile) & (parts < NUM_PARTS)).to(tl.int32), 0) - 1
    begin = tl.load(starts + part)
    return part, begin, tl.load(starts + part + 1), begin + (tile - begin // ROWS - part) * ROWS
