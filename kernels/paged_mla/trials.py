"""Trials of latent attention."""

from __future__ import annotations

from functools import partial

import torch

from kernels.paged_mla import kernel, reference
from kernels.paged_mla.cases import CASES, MlaCase
from kernels.tiles import Tile
from kernels.trial import Prepared, Setting, Trial


def prepare(
    setting: Setting, *, case: MlaCase, tile: Tile | None = None, splits: int | None = None
) -> Prepared:
    """One query a sequence; slots that hold no token are NaN."""
    latent_query: torch.Tensor | None
    width = case.latent + case.part * case.rope_groups
    if setting.device == "cpu":
        tensors = case.inputs()
        place = setting.place
        latent_query = None if tensors.query_latent is None else place(tensors.query_latent.to(setting.dtype))
        rope, cache = place(tensors.query_rope.to(setting.dtype)), setting.behind_nan(tensors.cache)
        tables, lengths, scale = place(tensors.block_tables + 1), place(tensors.kv_lens), tensors.scale
    else:
        blocks = -(-max(case.lengths) // case.block_size)
        tables = setting.shuffled(blocks * len(case.lengths)).view(len(case.lengths), blocks)
        cache = setting.normal(blocks * len(case.lengths), case.block_size, width)
        latent_query = (
            setting.normal(len(case.lengths), case.heads, case.latent) if case.scores_latent else None
        )
        rope = setting.normal(len(case.lengths), case.heads, case.part)
        lengths, scale = setting.numbers(case.lengths), 192**-0.5
    groups, tokens = case.rope_groups, sum(case.lengths)
    arguments = (latent_query, rope, cache, tables, lengths, scale)
    moved = (
        tokens * width + rope.numel() + (1 + case.scores_latent) * rope.shape[0] * case.heads * case.latent
    )
    return Prepared(
        lambda launch: (
            kernel.paged_mla_decode(*arguments, rope_groups=groups, tile=tile, splits=splits, launch=launch),
        ),
        lambda: (reference.paged_mla_decode(*arguments, rope_groups=groups),),
        moved * cache.element_size(),
        2 * tokens * case.heads * (case.latent + case.part + case.scores_latent * case.latent),
    )


def prepare_gather(setting: Setting, *, tokens: int, width: int, block_size: int) -> Prepared:
    """The context of one sequence out of a shuffled cache."""
    blocks = -(-tokens // block_size)
    cache, table = setting.normal(blocks, block_size, width), setting.shuffled(blocks)
    return Prepared(
        lambda launch: (kernel.gather_latent(cache, table, tokens, launch=launch),),
        lambda: (reference.gather_latent(cache, table, tokens),),
        2 * tokens * width * cache.element_size(),
    )


_TINY = Tile(16, 16, 0, 4, 1)
_PLAIN = MlaCase("plain", 4, 64, 32, 1, True, 16, (5, 33, 70))
_GROUPED = MlaCase("rope groups, no latent scores", 9, 48, 24, 3, False, 16, (1, 37))
SMALL = (
    Trial("paged_mla", "decode", partial(prepare, case=_PLAIN, tile=_TINY, splits=1)),
    Trial("paged_mla", "decode, cut in 4", partial(prepare, case=_PLAIN, tile=_TINY, splits=4)),
    Trial("paged_mla", "rope groups, no latent scores", partial(prepare, case=_GROUPED, tile=_TINY)),
    Trial("paged_mla", "odd blocks", partial(prepare, case=CASES[4]), (torch.float16,)),
    Trial("paged_mla", "gather", partial(prepare_gather, tokens=11, width=40, block_size=4)),
)
REAL = (
    Trial("paged_mla", "decode 64 x 8192, 64 heads", partial(
        prepare, case=MlaCase("kimi", 64, 512, 64, 1, True, 64, (8192,) * 64))),
    Trial("paged_mla", "decode 8 x 8192, 8 heads, cut", partial(
        prepare, case=MlaCase("kimi, one of 8 ranks", 8, 512, 64, 1, True, 64, (8192,) * 8))),
    Trial("paged_mla", "gather 32768", partial(prepare_gather, tokens=32768, width=576, block_size=64)),
)  # fmt: skip
