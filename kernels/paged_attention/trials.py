"""Trials of attention over the paged cache and over contiguous keys and values."""

from __future__ import annotations

from functools import partial

import torch
from torch import Tensor
from torch.nn.functional import scaled_dot_product_attention

from kernels.paged_attention import kernel, reference
from kernels.paged_attention.cases import CASES, AttentionCase
from kernels.tiles import Tile
from kernels.trial import Prepared, Setting, Trial


def prepare(
    setting: Setting, *, case: AttentionCase, tile: Tile | None = None, splits: int | None = None
) -> Prepared:
    """A mixed batch; slots that hold no token are NaN."""
    tensors = case.inputs() if setting.device == "cpu" else None
    if tensors is not None:
        query = setting.place(tensors.query.to(setting.dtype))
        keys, values = (setting.behind_nan(cache) for cache in (tensors.key_cache, tensors.value_cache))
        tables, starts, lengths = (
            setting.place(x) for x in (tensors.block_tables + 1, tensors.query_starts, tensors.kv_lens)
        )
    else:
        query, keys, values, tables, starts, lengths = _large(setting, case)
    arguments = (query, keys, values, tables, starts, lengths, case.dim**-0.5)
    pairs = sum(count * length - count * (count - 1) // 2 for count, length in case.sequences)
    tokens = sum(length for _, length in case.sequences)
    size = query.element_size()
    moved = tokens * case.kv_heads * (case.dim + case.value_dim) + query.shape[0] * case.heads * (
        case.dim + case.value_dim
    )
    return Prepared(
        lambda launch: (kernel.paged_attention(*arguments, tile=tile, splits=splits, launch=launch),),
        lambda: (reference.paged_attention(*arguments),),
        moved * size,
        2 * pairs * case.heads * (case.dim + case.value_dim),
    )


def _large(setting: Setting, case: AttentionCase) -> tuple[Tensor, ...]:
    """The tensors of ``case`` made on the device, without a loop over blocks."""
    longest = max(length for _, length in case.sequences)
    width = -(-longest // case.block_size)
    blocks = width * len(case.sequences)
    tables = setting.shuffled(blocks).view(len(case.sequences), width)
    keys = setting.normal(blocks, case.kv_heads, case.dim, case.block_size)
    values = setting.normal(blocks, case.kv_heads, case.block_size, case.value_dim)
    starts = [0]
    for count, _ in case.sequences:
        starts.append(starts[-1] + count)
    query = setting.normal(starts[-1], case.heads, case.dim)
    lengths = setting.numbers([length for _, length in case.sequences])
    return query, keys, values, tables, setting.numbers(starts), lengths


def prepare_causal(
    setting: Setting, *, queries: int, tokens: int, heads: int, kv_heads: int, dim: int, value_dim: int,
    tile: Tile | None = None,
) -> Prepared:  # fmt: skip
    """Contiguous keys and values, side by side as an expanded latent leaves them."""
    query = setting.normal(queries, heads, dim)
    expanded = setting.normal(tokens, kv_heads, dim + value_dim)
    key, value = expanded[..., :dim], expanded[..., dim:]
    scale = dim**-0.5
    pairs = queries * tokens - queries * (queries - 1) // 2

    def torch_form() -> Tensor:
        q, k, v = query.transpose(0, 1)[None], key.transpose(0, 1)[None], value.transpose(0, 1)[None]
        return scaled_dot_product_attention(
            q, k, v, is_causal=True, scale=scale, enable_gqa=heads != kv_heads
        )

    return Prepared(
        lambda launch: (kernel.causal_attention(query, key, value, scale, tile=tile, launch=launch),),
        lambda: (reference.causal_attention(query, key, value, scale),),
        (query.numel() + expanded.numel() + queries * heads * value_dim) * query.element_size(),
        2 * pairs * heads * (dim + value_dim),
        {"torch": torch_form} if queries == tokens else {},
    )


_TINY = Tile(32, 32, 0, 4, 1)
_NARROW = Tile(16, 16, 0, 4, 1)
_SHORT = AttentionCase("decode", 6, 2, 48, 40, 16, ((1, 17), (1, 75), (1, 1)))
_MIXED = AttentionCase("mixed", 6, 3, 32, 32, 16, ((1, 33), (5, 5), (21, 50)))
SMALL = (
    Trial("paged_attention", "decode", partial(prepare, case=_SHORT, tile=_NARROW, splits=1)),
    Trial("paged_attention", "decode, cut in 4", partial(prepare, case=_SHORT, tile=_NARROW, splits=4)),
    Trial("paged_attention", "one token", partial(prepare, case=CASES[0]), (torch.float16,)),
    Trial("paged_attention", "mixed", partial(prepare, case=_MIXED, tile=_TINY)),
    Trial("paged_attention", "many heads a group, tiles of the table", partial(prepare, case=CASES[5]),
          (torch.float16,)),
    Trial("paged_attention", "contiguous", partial(
        prepare_causal, queries=20, tokens=45, heads=4, kv_heads=2, dim=24, value_dim=16, tile=_TINY)),
)  # fmt: skip
_DECODE = AttentionCase("decode", 32, 8, 128, 128, 64, ((1, 8192),) * 64)
_CHUNK = AttentionCase("chunk", 32, 8, 128, 128, 64, ((2048, 8192), (2048, 2048)))
REAL = (
    Trial("paged_attention", "decode 64 x 8192, 32 heads over 8 of 128", partial(prepare, case=_DECODE)),
    Trial("paged_attention", "decode 2 x 8192, cut", partial(
        prepare, case=AttentionCase("few", 32, 8, 128, 128, 64, ((1, 8192),) * 2))),
    Trial("paged_attention", "chunks 2048 of 8192 and of 2048", partial(prepare, case=_CHUNK)),
    Trial("paged_attention", "MLA prefill 4096, 64 heads of 192 and 128", partial(
        prepare_causal, queries=4096, tokens=4096, heads=64, kv_heads=64, dim=192, value_dim=128)),
)  # fmt: skip
