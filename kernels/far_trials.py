"""Trials whose offsets do not fit 32 bits, on address space that takes no memory until it is used."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

import numpy as np
import torch
from torch import Tensor

from kernels.grouped_gemm import kernel as gemm
from kernels.launching import Launcher
from kernels.paged_attention import kernel as attention
from kernels.paged_mla import kernel as mla
from kernels.rms_norm import kernel as rms_norm
from kernels.store_kv import kernel as store
from kernels.tiles import Tile
from kernels.trial import Prepared, Setting, Trial

_BLOCK_SIZE, _LENGTH = 16, 24
_TINY = Tile(16, 16, 0, 4, 1)


def _zeros(*shape: int) -> Tensor:
    return torch.from_numpy(np.zeros(shape, np.float16))


def _tables(blocks: int) -> tuple[Tensor, Tensor]:
    """Where 24 tokens lie: at the far end of a cache, and in one of two blocks."""
    return torch.tensor([[blocks - 1, blocks - 2]], dtype=torch.int32), torch.tensor(
        [[0, 1]], dtype=torch.int32
    )


def _slots(table: Tensor) -> Tensor:
    at = torch.arange(_LENGTH)
    return table[0].long()[at // _BLOCK_SIZE] * _BLOCK_SIZE + at % _BLOCK_SIZE


def _both(run: Callable[[Tensor, int, Launcher], Tensor], blocks: int) -> Prepared:
    """Store and attend far out; the same close by is what it must give."""
    from kernels.launching import launch_now

    far, near = _tables(blocks)
    return Prepared(lambda launch: (run(far, blocks, launch),), lambda: (run(near, 2, launch_now),))


def prepare_mla(setting: Setting) -> Prepared:
    """Latents beyond 2**31 elements."""
    width, lengths = 32, setting.numbers([_LENGTH])
    rows, query = setting.normal(_LENGTH, width), setting.normal(1, 2, width)

    def run(table: Tensor, blocks: int, launch: Launcher) -> Tensor:
        cache = _zeros(blocks, _BLOCK_SIZE, width)
        store.store_latent(rows[:, :16], rows[:, 16:], cache, _slots(table), launch=launch)
        return mla.paged_mla_decode(
            query[..., :16], query[..., 16:], cache, table, lengths, 0.2, tile=_TINY, splits=1, launch=launch
        )

    return _both(run, 2**31 // (_BLOCK_SIZE * width) + 3)


def prepare_attention(setting: Setting) -> Prepared:
    """Keys and values beyond 2**31 elements."""
    heads, dim, lengths, starts = 2, 16, setting.numbers([_LENGTH]), setting.numbers([0, 1])
    key, value, query = (setting.normal(count, heads, dim) for count in (_LENGTH, _LENGTH, 1))

    def run(table: Tensor, blocks: int, launch: Launcher) -> Tensor:
        keys, values = _zeros(blocks, heads, dim, _BLOCK_SIZE), _zeros(blocks, heads, _BLOCK_SIZE, dim)
        store.store_kv(key, value, keys, values, _slots(table), launch=launch)
        return attention.paged_attention(
            query, keys, values, table, starts, lengths, 0.25, tile=_TINY, splits=1, launch=launch
        )

    return _both(run, 2**31 // (_BLOCK_SIZE * heads * dim) + 3)


def prepare_rows(setting: Setting, *, op: str) -> Prepared:
    """Rows 2**30 elements apart."""
    rows, width = 3, 32
    near = setting.normal(rows, width)
    far = _zeros(2**31 + width).as_strided((rows, width), (2**30, 1))
    far.copy_(near)
    weight, starts = setting.normal(1, 16, width), setting.numbers([0, rows])
    tile = Tile(16, 16, 32, 4, 1)

    def run(x: Tensor, launch: Launcher) -> Tensor:
        if op == "rms_norm":
            return rms_norm.rms_norm(x, None, 1e-5, launch=launch)
        return gemm.grouped_gemm(x, weight, starts, tile=tile, launch=launch)

    from kernels.launching import launch_now

    return Prepared(lambda launch: (run(far, launch),), lambda: (run(near, launch_now),))


_HALF = (torch.float16,)
SMALL = (
    Trial("paged_mla", "far into a cache", prepare_mla, _HALF),
    Trial("paged_attention", "far into a cache", prepare_attention, _HALF),
    Trial("rms_norm", "rows far apart", partial(prepare_rows, op="rms_norm"), _HALF),
    Trial("grouped_gemm", "rows far apart", partial(prepare_rows, op="grouped_gemm"), _HALF),
)
