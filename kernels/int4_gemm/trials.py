"""Trials of the product with 4-bit weights."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from itertools import pairwise

import torch

from kernels.grouped_gemm.trials import SIZES, even_starts, starts_of
from kernels.int4_gemm import kernel, reference
from kernels.tiles import Tile
from kernels.trial import Prepared, Setting, Trial


def prepare(
    setting: Setting, *, bounds: Sequence[int], columns: int, depth: int, group: int = 32,
    tile: Tile | None = None,
) -> Prepared:  # fmt: skip
    """Experts with the rows between ``bounds``; all sixteen nibbles occur."""
    experts, rows = len(bounds) - 1, bounds[-1]
    x = setting.normal(rows, depth)
    packed = setting.integers(-(2**31), 2**31, experts, columns, depth // 8, dtype=torch.int32)
    scales = setting.normal(experts, columns, depth // group, scale=0.3 * depth**-0.5)
    starts = setting.numbers(bounds)
    touched = sum(begin < end for begin, end in pairwise(bounds))
    size = x.element_size()
    return Prepared(
        lambda launch: (kernel.int4_gemm(x, packed, scales, starts, tile=tile, launch=launch),),
        lambda: (reference.int4_gemm(x, packed, scales, starts),),
        touched * columns * (depth // 2 + depth // group * size) + rows * (columns + depth) * size,
        2 * rows * columns * depth,
    )


_TINY = Tile(16, 32, 64, 4, 1)
SMALL = (
    Trial("int4_gemm", "22 rows, 4 experts", partial(
        prepare, bounds=starts_of(SIZES), columns=40, depth=160, tile=_TINY), tolerance=4),
    Trial("int4_gemm", "groups of 16, tiles of the table", partial(
        prepare, bounds=starts_of((2, 5)), columns=70, depth=144, group=16)),
)  # fmt: skip
REAL = (
    Trial("int4_gemm", "decode 512 rows, 384 experts, 4096 x 7168", partial(
        prepare, bounds=even_starts(512, 384), columns=4096, depth=7168)),
    Trial("int4_gemm", "decode 512 rows, 384 experts, 7168 x 2048", partial(
        prepare, bounds=even_starts(512, 384), columns=7168, depth=2048)),
    Trial("int4_gemm", "prefill 16384 rows, 48 experts, 4096 x 7168", partial(
        prepare, bounds=even_starts(16384, 48), columns=4096, depth=7168)),
)  # fmt: skip
