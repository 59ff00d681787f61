"""Triton form of the grouped product: one program a tile of one expert's result."""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from kernels import tiles
from kernels.launching import Launcher, is_interpreted, launch_now
from kernels.tile_math import dot, find_tile
from kernels.tiles import Tile, power_of_two


@triton.jit
def multiply_groups(
    x, weight, starts, out, x_stride,
    EXPERTS: tl.constexpr, BLOCK_EXPERTS: tl.constexpr, COLUMNS: tl.constexpr, DEPTH: tl.constexpr,
    ROWS_TILE: tl.constexpr, COLUMNS_TILE: tl.constexpr, DEPTH_TILE: tl.constexpr, WIDEN_DOT: tl.constexpr,
):  # fmt: skip
    expert, _, end, first = find_tile(starts, tl.program_id(1), EXPERTS, BLOCK_EXPERTS, ROWS_TILE)
    if first >= end:
        return
    row = first + tl.arange(0, ROWS_TILE)
    column = tl.program_id(0) * COLUMNS_TILE + tl.arange(0, COLUMNS_TILE)
    depth = tl.arange(0, DEPTH_TILE)
    is_row, is_column = row < end, column < COLUMNS
    # Experts lie further apart than 2**31 elements can say.
    matrix = weight + expert.to(tl.int64) * (COLUMNS * DEPTH)
    x_at = x + row.to(tl.int64)[:, None] * x_stride + depth[None, :]
    weight_at = matrix + column.to(tl.int64)[None, :] * DEPTH + depth[:, None]
    total = tl.zeros((ROWS_TILE, COLUMNS_TILE), dtype=tl.float32)
    for begin in range(0, DEPTH, DEPTH_TILE):
        is_depth = begin + depth < DEPTH
        left = tl.load(x_at + begin, mask=is_row[:, None] & is_depth[None, :], other=0.0)
        right = tl.load(weight_at + begin, mask=is_depth[:, None] & is_column[None, :], other=0.0)
        total += dot(left, right, WIDEN_DOT)
    place = out + row.to(tl.int64)[:, None] * COLUMNS + column[None, :]
    tl.store(place, total.to(out.dtype.element_ty), mask=is_row[:, None] & is_column[None, :])


def grouped_gemm(
    x: Tensor, weight: Tensor, starts: Tensor, *, tile: Tile | None = None, launch: Launcher = launch_now
) -> Tensor:
    """See :func:`kernels.grouped_gemm.grouped_gemm`; ``tile`` overrides the table."""
    (rows, depth), (experts, columns, _) = x.shape, weight.shape
    few = rows <= 16 * experts
    chosen = tile or (tiles.GROUPED_GEMM_FEW if few else tiles.GROUPED_GEMM)
    out = torch.empty((rows, columns), dtype=x.dtype, device=x.device)
    grid = (triton.cdiv(columns, chosen.columns), rows // chosen.rows + experts if rows else 0)
    launch(
        multiply_groups, grid, num_warps=chosen.num_warps, num_stages=chosen.num_stages,
        x=x, weight=weight, starts=starts, out=out, x_stride=x.stride(0),
        EXPERTS=experts, BLOCK_EXPERTS=power_of_two(experts), COLUMNS=columns, DEPTH=depth,
        ROWS_TILE=chosen.rows, COLUMNS_TILE=chosen.columns, DEPTH_TILE=chosen.depth,
        WIDEN_DOT=is_interpreted(),
    )  # fmt: skip
    return out
