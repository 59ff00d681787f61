"""Trials of the grouped product."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from itertools import pairwise

import torch
from torch import Tensor

from kernels.grouped_gemm import kernel, reference
from kernels.tiles import Tile
from kernels.trial import Prepared, Setting, Trial

SIZES = (3, 0, 18, 1)
"""Rows of the experts in small trials: one has none, one more than a tile."""


def even_starts(rows: int, experts: int) -> Sequence[int]:
    """Rows dealt out as evenly as possible."""
    return [rows * expert // experts for expert in range(experts + 1)]


def starts_of(sizes: Sequence[int]) -> Sequence[int]:
    """Where experts with so many rows each begin, and the end."""
    starts = [0]
    for size in sizes:
        starts.append(starts[-1] + size)
    return starts


def prepare(
    setting: Setting, *, bounds: Sequence[int], columns: int, depth: int, tile: Tile | None = None
) -> Prepared:
    """Experts with the rows between ``bounds``."""
    experts, rows = len(bounds) - 1, bounds[-1]
    x = setting.normal(rows, depth)
    weight = setting.normal(experts, columns, depth, scale=depth**-0.5)
    starts = setting.numbers(bounds)
    alternatives: dict[str, Callable[[], object]] = {"torch": lambda: torch_form(x, weight, starts)}
    touched = sum(begin < end for begin, end in pairwise(bounds))
    return Prepared(
        lambda launch: (kernel.grouped_gemm(x, weight, starts, tile=tile, launch=launch),),
        lambda: (reference.grouped_gemm(x, weight, starts),),
        touched * columns * depth * x.element_size() + rows * (columns + depth) * x.element_size(),
        2 * rows * columns * depth,
        alternatives,
    )


def torch_form(x: Tensor, weight: Tensor, starts: Tensor) -> Tensor:
    """torch's own grouped product (CUTLASS)."""
    return torch.nn.functional.grouped_mm(x, weight.transpose(1, 2), offs=starts[1:])


_TINY = Tile(16, 32, 32, 4, 1)
SMALL = (
    Trial("grouped_gemm", "22 rows, 4 experts", partial(
        prepare, bounds=starts_of(SIZES), columns=40, depth=72, tile=_TINY), tolerance=4),
    Trial("grouped_gemm", "tiles of the table", partial(
        prepare, bounds=starts_of((2, 5)), columns=130, depth=96)),
)  # fmt: skip
REAL = (
    Trial("grouped_gemm", "decode 256 rows, 96 experts, 4096 x 7168", partial(
        prepare, bounds=even_starts(256, 96), columns=4096, depth=7168)),
    Trial("grouped_gemm", "prefill 16384 rows, 48 experts, 4096 x 7168", partial(
        prepare, bounds=even_starts(16384, 48), columns=4096, depth=7168)),
    Trial("grouped_gemm", "prefill 16384 rows, 48 experts, 7168 x 2048", partial(
        prepare, bounds=even_starts(16384, 48), columns=7168, depth=2048)),
)  # fmt: skip
