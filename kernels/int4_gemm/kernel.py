"""Triton form of the grouped product with 4-bit weights.

A tile of weights is unpacked in registers and is the left operand, which the tensor cores of Hopper take from
registers: so the unpacked weight never passes through shared memory, and a decode's few rows make a narrow
result instead of a padded one. The result's tile is ``columns x rows`` and is stored transposed.
"""

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
def multiply_packed_groups(
    x, packed, scales, starts, out, x_stride,
    EXPERTS: tl.constexpr, BLOCK_EXPERTS: tl.constexpr, COLUMNS: tl.constexpr, DEPTH: tl.constexpr,
    GROUP: tl.constexpr, ROWS_TILE: tl.constexpr, COLUMNS_TILE: tl.constexpr, DEPTH_TILE: tl.constexpr,
    WIDEN_DOT: tl.constexpr,
):  # fmt: skip
    words: tl.constexpr = DEPTH_TILE // 8
    groups: tl.constexpr = DEPTH_TILE // GROUP
    expert, _, end, first = find_tile(starts, tl.program_id(1), EXPERTS, BLOCK_EXPERTS, ROWS_TILE)
    if first >= end:
        return
    row = first + tl.arange(0, ROWS_TILE)
    column = tl.program_id(0) * COLUMNS_TILE + tl.arange(0, COLUMNS_TILE)
    depth, word, group = tl.arange(0, DEPTH_TILE), tl.arange(0, words), tl.arange(0, groups)
    is_row, is_column = row < end, column < COLUMNS
    line = expert.to(tl.int64) * COLUMNS + column.to(tl.int64)
    packed_at = packed + line[:, None] * (DEPTH // 8) + word[None, :]
    scales_at = scales + line[:, None] * (DEPTH // GROUP) + group[None, :]
    x_at = x + row.to(tl.int64)[None, :] * x_stride + depth[:, None]
    shift = 4 * tl.arange(0, 8)
    total = tl.zeros((COLUMNS_TILE, ROWS_TILE), dtype=tl.float32)
    for begin in range(0, DEPTH, DEPTH_TILE):
        is_word = is_column[:, None] & (begin // 8 + word < DEPTH // 8)[None, :]
        is_group = is_column[:, None] & (begin // GROUP + group < DEPTH // GROUP)[None, :]
        nibbles = tl.load(packed_at + begin // 8, mask=is_word, other=0)
        scale = tl.load(scales_at + begin // GROUP, mask=is_group, other=0.0).to(tl.float32)
        # Nibbles are offset binary: 8 stands for zero.
        whole = ((nibbles[:, :, None] >> shift[None, None, :]) & 0xF) - 8
        whole = tl.reshape(whole, (COLUMNS_TILE, groups, GROUP)).to(tl.float32)
        weight = tl.reshape(whole * scale[:, :, None], (COLUMNS_TILE, DEPTH_TILE)).to(x.dtype.element_ty)
        inside = (begin + depth < DEPTH)[:, None] & is_row[None, :]
        total += dot(weight, tl.load(x_at + begin, mask=inside, other=0.0), WIDEN_DOT)
    place = out + row.to(tl.int64)[None, :] * COLUMNS + column[:, None]
    tl.store(place, total.to(out.dtype.element_ty), mask=is_column[:, None] & is_row[None, :])


def int4_gemm(
    x: Tensor, packed: Tensor, scales: Tensor, starts: Tensor,
    *, tile: Tile | None = None, launch: Launcher = launch_now,
) -> Tensor:  # fmt: skip
    """See :func:`kernels.int4_gemm.int4_gemm`; ``tile`` overrides the table."""
    (rows, depth), (experts, columns, num_groups) = x.shape, scales.shape
    chosen = tile or (tiles.INT4_GEMM_FEW if rows <= 16 * experts else tiles.INT4_GEMM)
    out = torch.empty((rows, columns), dtype=x.dtype, device=x.device)
    grid = (triton.cdiv(columns, chosen.columns), rows // chosen.rows + experts if rows else 0)
    launch(
        multiply_packed_groups, grid, num_warps=chosen.num_warps, num_stages=chosen.num_stages,
        x=x, packed=packed, scales=scales, starts=starts, out=out, x_stride=x.stride(0),
        EXPERTS=experts, BLOCK_EXPERTS=power_of_two(experts), COLUMNS=columns, DEPTH=depth,
        GROUP=depth // num_groups, ROWS_TILE=chosen.rows, COLUMNS_TILE=chosen.columns,
        DEPTH_TILE=chosen.depth, WIDEN_DOT=is_interpreted(),
    )  # fmt: skip
    return out
