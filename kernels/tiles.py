"""Tile sizes and warps by kernel, for an H100 or H200: one committed table instead of tuning at run time.

The table was chosen from what compiles use (registers without spills, shared memory that leaves room for
stages); it has not been timed: ``make gpu-check`` shows where it falls short, and launching functions take
another ``tile``.
"""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Tile:
    """``rows`` x ``columns`` of the result, ``depth`` of the sum at a time."""

    rows: int
    columns: int
    depth: int
    num_warps: int
    num_stages: int


ATTENTION_DECODE = Tile(16, 64, 0, 4, 3)
"""At least ``rows`` heads of a group by ``columns`` keys."""
ATTENTION_PREFILL = Tile(128, 64, 0, 8, 2)
"""``rows`` pairs of query and head by ``columns`` keys."""
MLA_DECODE = Tile(64, 32, 0, 8, 2)
"""``rows`` heads by ``columns`` latents."""
MLA_DECODE_WIDE = Tile(16, 16, 0, 8, 1)
"""For latents wider than 512."""
GROUPED_GEMM = Tile(64, 128, 64, 4, 3)
GROUPED_GEMM_FEW = Tile(16, 128, 128, 4, 3)
"""For at most 16 rows an expert on average: decode."""
INT4_GEMM = Tile(64, 128, 64, 8, 3)
INT4_GEMM_FEW = Tile(16, 64, 128, 4, 4)
FP8_GEMM = Tile(128, 128, 128, 8, 3)
FP8_GEMM_FEW = Tile(16, 128, 128, 4, 4)

NUM_MULTIPROCESSORS = 132
"""Of an H100 or H200; split-KV aims at two programs for each."""
MAX_SPLITS = 16
"""Parts that one context may be cut into."""


def pick_splits(num_programs: int, max_tokens: int, step: int) -> int:
    """Into how many parts contexts are cut so that a decode fills the card; a power of two.

    Args:
        num_programs: that run without cutting.
        max_tokens: the longest context that the block tables can hold.
        step: tokens that a program handles at a time; a part has at least four steps.
    """
    splits = 1
    while (
        splits < MAX_SPLITS
        and num_programs * splits < 2 * NUM_MULTIPROCESSORS
        and max_tokens >= 8 * splits * step
    ):
        splits *= 2
    return splits


def power_of_two(count: int, at_least: int = 1) -> int:
    """The smallest power of two that is not below ``count`` and ``at_least``."""
    return max(at_least, 1 << max(0, count - 1).bit_length())
