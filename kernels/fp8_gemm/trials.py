"""Trials of the 8-bit product."""

from __future__ import annotations

from functools import partial

import torch

from kernels.fp8_gemm import kernel, reference
from kernels.tiles import Tile
from kernels.trial import Prepared, Setting, Trial

_LARGEST = 448.0


def prepare_quantise(setting: Setting, *, rows: int, width: int) -> Prepared:
    """Rows to 8 bits."""
    x = setting.normal(rows, width)
    dtype = setting.float8
    return Prepared(
        lambda launch: kernel.quantise_rows(x, dtype, _LARGEST, launch=launch),
        lambda: reference.quantise_rows(x, dtype, _LARGEST),
        x.nbytes + rows * width * dtype.itemsize + rows * width // 32,
        3 * rows * width,
    )


def prepare(
    setting: Setting, *, rows: int, columns: int, depth: int, tile: Tile | None = None
) -> Prepared:  # fmt: skip
    """Numbers that 8 bits hold exactly, scales that differ from block to block."""
    blocks, groups = -(-columns // 128), -(-depth // 128)
    x = setting.place(setting.integers(-8, 9, rows, depth).to(setting.float8))
    weight = setting.place(setting.integers(-8, 9, columns, depth).to(setting.float8))
    x_scales, weight_scales = setting.uniform(rows, groups), setting.uniform(blocks, groups)
    arguments = (x, x_scales, weight, weight_scales, setting.dtype)
    size = torch.empty(0, dtype=setting.float8).element_size()
    return Prepared(
        lambda launch: (kernel.fp8_gemm(*arguments, tile=tile, launch=launch),),
        lambda: (reference.fp8_gemm(*arguments),),
        (rows + columns) * depth * size + rows * columns * setting.dtype.itemsize,
        2 * rows * columns * depth,
    )


_TINY = Tile(16, 64, 128, 4, 1)
SMALL = (
    Trial("fp8_gemm", "quantise 3 x 300", partial(prepare_quantise, rows=3, width=300)),
    Trial("fp8_gemm", "19 x 200 x 300", partial(prepare, rows=19, columns=200, depth=300, tile=_TINY)),
)
REAL = (
    Trial("fp8_gemm", "quantise 8192 x 7168", partial(prepare_quantise, rows=8192, width=7168)),
    Trial("fp8_gemm", "decode 64 x 7168 x 8192", partial(prepare, rows=64, columns=7168, depth=8192)),
    Trial("fp8_gemm", "prefill 8192 x 7168 x 8192", partial(prepare, rows=8192, columns=7168, depth=8192)),
    Trial("fp8_gemm", "prefill 8192 x 12288 x 1536", partial(prepare, rows=8192, columns=12288, depth=1536)),
)
