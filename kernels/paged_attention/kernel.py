"""Triton form of paged attention: decodes and chunks in one launch, contexts in parts to fill the card.

A program has a tile of queries with all query heads of one KV head, so keys and values are read once for the
whole group. Nobody waits for the lengths: tiles are found on the device (see ``find_tile``), and the number
of parts follows from what the block tables could hold.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from kernels import tiles
from kernels.launching import Launcher, is_interpreted, launch_now
from kernels.tile_math import dot, find_tile
from kernels.tiles import Tile, pick_splits, power_of_two

LOG2_E = 1.4426950408889634


@triton.jit
def _place_of(table, position, is_key, BLOCK_SIZE: tl.constexpr, PAGED: tl.constexpr):
    """The block of each position and the place in it; without pages every position is a block."""
    if PAGED:
        block = tl.load(table + position // BLOCK_SIZE, mask=is_key, other=0).to(tl.int64)
        offset = position % BLOCK_SIZE
    else:
        block = position.to(tl.int64)
        offset = position * 0
    return block, offset


@triton.jit
def _weigh(scores, top):
    """The highest score of each row so far, the weights beside it, and what older weights are worth now."""
    highest = tl.maximum(top, tl.max(scores, 1))
    # A row that has seen no key yet has no largest score to subtract.
    safe = tl.where(highest == float("-inf"), 0.0, highest)
    return highest, tl.exp2(scores - safe[:, None]), tl.exp2(top - safe)


@triton.jit
def _log_of(top, mass):
    """The logarithm of what a row weighs; nothing where it has seen no key."""
    return tl.where(mass > 0.0, top + tl.log2(tl.where(mass > 0.0, mass, 1.0)), float("-inf"))


@triton.jit
def attend(
    query, key, value, tables, query_starts, kv_lens, out, part_sums, part_logs,
    scale, query_stride, query_head_stride, key_block_stride, key_head_stride, key_dim_stride, key_stride,
    value_block_stride, value_head_stride, value_stride, max_blocks,
    SEQUENCES: tl.constexpr, BLOCK_SEQUENCES: tl.constexpr, HEADS: tl.constexpr, KV_HEADS: tl.constexpr,
    DIM: tl.constexpr, VALUE_DIM: tl.constexpr, BLOCK_SIZE: tl.constexpr, QUERIES: tl.constexpr,
    BLOCK_GROUP: tl.constexpr, KEYS: tl.constexpr, BLOCK_DIM: tl.constexpr, BLOCK_VALUE: tl.constexpr,
    SPLITS: tl.constexpr, PAGED: tl.constexpr, WIDEN_DOT: tl.constexpr,
):  # fmt: skip
    group: tl.constexpr = HEADS // KV_HEADS
    kv_head = tl.program_id(1).to(tl.int64)
    split = tl.program_id(2)
    sequence, begin, end, first = find_tile(
        query_starts, tl.program_id(0), SEQUENCES, BLOCK_SEQUENCES, QUERIES
    )
    if first >= end:
        return
    pair = tl.arange(0, QUERIES * BLOCK_GROUP)
    row = first + pair // BLOCK_GROUP
    in_group = pair % BLOCK_GROUP
    is_pair = (row < end) & (in_group < group)
    head = kv_head * group + in_group
    dim, value_dim, step = tl.arange(0, BLOCK_DIM), tl.arange(0, BLOCK_VALUE), tl.arange(0, KEYS)
    is_dim, is_value = dim < DIM, value_dim < VALUE_DIM
    at = query + row.to(tl.int64)[:, None] * query_stride + head[:, None] * query_head_stride + dim[None, :]
    queries = tl.load(at, mask=is_pair[:, None] & is_dim[None, :], other=0.0)

    length = tl.load(kv_lens + sequence)
    # The last key that each query sees.
    last = length - (end - begin) + row - begin
    seen = tl.minimum(length, length - (end - begin) + first - begin + QUERIES)
    part = tl.cdiv(tl.cdiv(length, SPLITS), KEYS) * KEYS
    table = tables + sequence.to(tl.int64) * max_blocks
    top = tl.full((QUERIES * BLOCK_GROUP,), float("-inf"), dtype=tl.float32)
    mass = tl.zeros((QUERIES * BLOCK_GROUP,), dtype=tl.float32)
    total = tl.zeros((QUERIES * BLOCK_GROUP, BLOCK_VALUE), dtype=tl.float32)
    for start in range(split * part, tl.minimum(seen, split * part + part), KEYS):
        position = start + step
        is_key = position < seen
        block, offset = _place_of(table, position, is_key, BLOCK_SIZE, PAGED)
        key_at = key + block * key_block_stride + kv_head * key_head_stride + offset * key_stride
        keys = tl.load(
            key_at[None, :] + dim[:, None] * key_dim_stride, mask=is_dim[:, None] & is_key[None, :], other=0.0
        )
        scores = dot(queries, keys, WIDEN_DOT) * scale
        scores = tl.where(position[None, :] <= last[:, None], scores, float("-inf"))
        top, weights, fade = _weigh(scores, top)
        value_at = value + block * value_block_stride + kv_head * value_head_stride + offset * value_stride
        values = tl.load(
            value_at[:, None] + value_dim[None, :], mask=is_key[:, None] & is_value[None, :], other=0.0
        )
        mass = mass * fade + tl.sum(weights, 1)
        total = total * fade[:, None] + dot(weights.to(values.dtype), values, WIDEN_DOT)
    line = row.to(tl.int64) * HEADS + head
    inside = is_pair[:, None] & is_value[None, :]
    total = total / tl.where(mass > 0.0, mass, 1.0)[:, None]
    if SPLITS == 1:
        place = out + line[:, None] * VALUE_DIM + value_dim[None, :]
        tl.store(place, total.to(out.dtype.element_ty), mask=inside)
    else:
        line = line * SPLITS + split
        tl.store(part_sums + line[:, None] * VALUE_DIM + value_dim[None, :], total, mask=inside)
        tl.store(part_logs + line, _log_of(top, mass), mask=is_pair)


@triton.jit
def combine_parts(
    part_sums, part_logs, out, SPLITS: tl.constexpr, WIDTH: tl.constexpr, BLOCK: tl.constexpr
):  # fmt: skip
    line = tl.program_id(0).to(tl.int64)
    split, at = tl.arange(0, SPLITS), tl.arange(0, BLOCK)
    log = tl.load(part_logs + line * SPLITS + split)
    share = tl.exp2(log - tl.max(log, 0))
    place = part_sums + (line * SPLITS + split)[:, None] * WIDTH + at[None, :]
    sums = tl.load(place, mask=(at < WIDTH)[None, :], other=0.0)
    result = tl.sum(sums * share[:, None], 0) / tl.sum(share, 0)
    tl.store(out + line * WIDTH + at, result.to(out.dtype.element_ty), mask=at < WIDTH)


def paged_attention(
    query: Tensor, key_cache: Tensor, value_cache: Tensor, block_tables: Tensor, query_starts: Tensor,
    kv_lens: Tensor, scale: float,
    *, tile: Tile | None = None, splits: int | None = None, launch: Launcher = launch_now,
) -> Tensor:  # fmt: skip
    """See :func:`kernels.paged_attention.paged_attention`; ``tile`` and ``splits`` override the table."""
    sequences, max_blocks = block_tables.shape
    key_strides = key_cache.stride()
    strides = {
        "key_block_stride": key_strides[0],
        "key_head_stride": key_strides[1],
        "key_dim_stride": key_strides[2],
        "key_stride": key_strides[3],
        "value_block_stride": value_cache.stride(0),
        "value_head_stride": value_cache.stride(1),
        "value_stride": value_cache.stride(2),
    }
    lengths = (query_starts, kv_lens, sequences, max_blocks * key_cache.shape[3])
    sizes = {
        "KV_HEADS": key_cache.shape[1],
        "VALUE_DIM": value_cache.shape[3],
        "BLOCK_SIZE": key_cache.shape[3],
    }
    arguments = {"key": key_cache, "value": value_cache, "tables": block_tables, "max_blocks": max_blocks}
    return _attend(
        query, lengths, scale, {**arguments, **strides, **sizes, "PAGED": True}, tile, splits, launch
    )


def causal_attention(
    query: Tensor, key: Tensor, value: Tensor, scale: float,
    *, tile: Tile | None = None, launch: Launcher = launch_now,
) -> Tensor:  # fmt: skip
    """See :func:`kernels.paged_attention.causal_attention`; tokens and heads may be strided."""
    count, tokens = query.shape[0], key.shape[0]
    starts = torch.arange(2, dtype=torch.int32, device=query.device) * count
    kv_lens = torch.full((1,), tokens, dtype=torch.int32, device=query.device)
    arguments = {
        "key": key,
        "value": value,
        "tables": kv_lens,
        "max_blocks": 1,
        "key_block_stride": key.stride(0),
        "key_head_stride": key.stride(1),
        "key_dim_stride": 1,
        "key_stride": 0,
        "value_block_stride": value.stride(0),
        "value_head_stride": value.stride(1),
        "value_stride": 0,
        "KV_HEADS": key.shape[1],
        "VALUE_DIM": value.shape[2],
        "BLOCK_SIZE": 1,
        "PAGED": False,
    }
    return _attend(query, (starts, kv_lens, 1, tokens), scale, arguments, tile, None, launch)


def _attend(
    query: Tensor, lengths: tuple[Tensor, Tensor, int, int], scale: float, arguments: dict[str, object],
    tile: Tile | None, splits: int | None, launch: Launcher,
) -> Tensor:  # fmt: skip
    """Launch ``attend``, and ``combine_parts`` when contexts are cut; ``lengths`` ends with the longest."""
    tokens, heads, dim = query.shape
    query_starts, kv_lens, sequences, max_tokens = lengths
    kv_heads, value_dim = int(arguments["KV_HEADS"]), int(arguments["VALUE_DIM"])  # type: ignore[call-overload]
    block_group = power_of_two(heads // kv_heads)
    is_decode = tokens == sequences
    chosen = tile or (tiles.ATTENTION_DECODE if is_decode else tiles.ATTENTION_PREFILL)
    queries = max(1, chosen.rows // block_group) if not is_decode else max(1, 16 // block_group)
    num_tiles = tokens // queries + sequences if tokens else 0
    parts = splits or (pick_splits(num_tiles * kv_heads, max_tokens, chosen.columns) if is_decode else 1)
    out = torch.empty((tokens, heads, value_dim), dtype=query.dtype, device=query.device)
    sums = logs = out
    if parts > 1:
        sums = torch.empty((tokens, heads, parts, value_dim), dtype=torch.float32, device=query.device)
        logs = torch.empty((tokens, heads, parts), dtype=torch.float32, device=query.device)
    launch(
        attend, (num_tiles, kv_heads, parts), num_warps=chosen.num_warps, num_stages=chosen.num_stages,
        query=query, query_starts=query_starts, kv_lens=kv_lens, out=out, part_sums=sums, part_logs=logs,
        scale=scale * LOG2_E, query_stride=query.stride(0), query_head_stride=query.stride(1),
        SEQUENCES=sequences, BLOCK_SEQUENCES=power_of_two(sequences), HEADS=heads, DIM=dim, QUERIES=queries,
        BLOCK_GROUP=block_group, KEYS=chosen.columns, BLOCK_DIM=power_of_two(dim, 16),
        BLOCK_VALUE=power_of_two(value_dim, 16), SPLITS=parts, WIDEN_DOT=is_interpreted(), **arguments,
    )  # fmt: skip
    if parts > 1:
        combine(sums, logs, out, launch)
    return out


def combine(sums: Tensor, logs: Tensor, out: Tensor, launch: Launcher) -> None:
    """Add up the parts ``[tokens, heads, parts, width]`` by the logarithms of their masses into ``out``."""
    width = sums.shape[-1]
    launch(
        combine_parts, (sums.shape[0] * sums.shape[1],), num_warps=4,
        part_sums=sums, part_logs=logs, out=out, SPLITS=sums.shape[2], WIDTH=width, BLOCK=power_of_two(width),
    )  # fmt: skip
