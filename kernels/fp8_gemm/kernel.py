"""Triton forms of the 8-bit product: rows to 8 bits, then a product with a scale for each 128 columns."""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from kernels import tiles
from kernels.launching import Launcher, is_interpreted, launch_now
from kernels.tile_math import dot
from kernels.tiles import Tile

BLOCK = 128
"""Rows and columns of a weight that share a scale."""


@triton.jit
def quantise(x, out, scales, stride, WIDTH: tl.constexpr, GROUP: tl.constexpr, LARGEST: tl.constexpr):
    row = tl.program_id(0).to(tl.int64)
    group = tl.program_id(1)
    at = group * GROUP + tl.arange(0, GROUP)
    inside = at < WIDTH
    value = tl.load(x + row * stride + at, mask=inside, other=0.0).to(tl.float32)
    scale = tl.maximum(tl.max(tl.abs(value), 0), 1e-10) / LARGEST
    tl.store(out + row * WIDTH + at, (value / scale).to(out.dtype.element_ty), mask=inside)
    tl.store(scales + row * tl.num_programs(1) + group, scale)


@triton.jit
def multiply_scaled(
    x, x_scales, weight, weight_scales, out, rows,
    COLUMNS: tl.constexpr, DEPTH: tl.constexpr, GROUP: tl.constexpr,
    ROWS_TILE: tl.constexpr, COLUMNS_TILE: tl.constexpr, WIDEN_DOT: tl.constexpr,
):  # fmt: skip
    groups: tl.constexpr = (DEPTH + GROUP - 1) // GROUP
    row = tl.program_id(1) * ROWS_TILE + tl.arange(0, ROWS_TILE)
    column = tl.program_id(0) * COLUMNS_TILE + tl.arange(0, COLUMNS_TILE)
    depth = tl.arange(0, GROUP)
    is_row, is_column = row < rows, column < COLUMNS
    x_at = x + row.to(tl.int64)[:, None] * DEPTH + depth[None, :]
    weight_at = weight + column.to(tl.int64)[None, :] * DEPTH + depth[:, None]
    x_scales_at = x_scales + row.to(tl.int64) * groups
    weight_scales_at = weight_scales + column // GROUP * groups
    total = tl.zeros((ROWS_TILE, COLUMNS_TILE), dtype=tl.float32)
    for group in range(0, groups):
        begin = group * GROUP
        is_depth = begin + depth < DEPTH
        left = tl.load(x_at + begin, mask=is_row[:, None] & is_depth[None, :], other=0.0)
        right = tl.load(weight_at + begin, mask=is_depth[:, None] & is_column[None, :], other=0.0)
        row_scale = tl.load(x_scales_at + group, mask=is_row, other=0.0)
        column_scale = tl.load(weight_scales_at + group, mask=is_column, other=0.0)
        # Sums of one group leave the tensor cores' narrow accumulator before they are scaled and added up.
        total += dot(left, right, WIDEN_DOT) * row_scale[:, None] * column_scale[None, :]
    place = out + row.to(tl.int64)[:, None] * COLUMNS + column[None, :]
    tl.store(place, total.to(out.dtype.element_ty), mask=is_row[:, None] & is_column[None, :])


def quantise_rows(
    x: Tensor, dtype: torch.dtype, largest: float, *, launch: Launcher = launch_now
) -> tuple[Tensor, Tensor]:
    """See :func:`kernels.fp8_gemm.quantise_rows`; ``largest`` is what a group's largest value becomes."""
    rows, width = x.shape
    groups = triton.cdiv(width, BLOCK)
    out = torch.empty((rows, width), dtype=dtype, device=x.device)
    scales = torch.empty((rows, groups), dtype=torch.float32, device=x.device)
    launch(
        quantise, (rows, groups), num_warps=1,
        x=x, out=out, scales=scales, stride=x.stride(0), WIDTH=width, GROUP=BLOCK, LARGEST=largest,
    )  # fmt: skip
    return out, scales


def fp8_gemm(
    x: Tensor, x_scales: Tensor, weight: Tensor, weight_scales: Tensor, dtype: torch.dtype,
    *, tile: Tile | None = None, launch: Launcher = launch_now,
) -> Tensor:  # fmt: skip
    """See :func:`kernels.fp8_gemm.fp8_gemm`; ``tile`` overrides the table."""
    (rows, depth), columns = x.shape, weight.shape[0]
    chosen = tile or (tiles.FP8_GEMM_FEW if rows <= 64 else tiles.FP8_GEMM)
    out = torch.empty((rows, columns), dtype=dtype, device=x.device)
    launch(
        multiply_scaled, (triton.cdiv(columns, chosen.columns), triton.cdiv(rows, chosen.rows)),
        num_warps=chosen.num_warps, num_stages=chosen.num_stages,
        x=x, x_scales=x_scales, weight=weight, weight_scales=weight_scales, out=out, rows=rows,
        COLUMNS=columns, DEPTH=depth, GROUP=BLOCK, ROWS_TILE=chosen.rows, COLUMNS_TILE=chosen.columns,
        WIDEN_DOT=is_interpreted(),
    )  # fmt: skip
    return out
