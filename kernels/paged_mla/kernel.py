"""Triton forms of absorbed latent attention and of the gather.

A program has some heads of one sequence and one part of its context. A latent is read once and serves as key
and as value of all those heads.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from kernels import tiles
from kernels.launching import Launcher, is_interpreted, launch_now
from kernels.paged_attention.kernel import LOG2_E, combine
from kernels.tile_math import dot
from kernels.tiles import Tile, pick_splits, power_of_two


@triton.jit
def attend_latents(
    query_latent, query_rope, cache, tables, kv_lens, out, part_sums, part_logs, scale,
    latent_stride, latent_head_stride, rope_stride, rope_head_stride, max_blocks,
    HEADS: tl.constexpr, GROUPS: tl.constexpr, LATENT: tl.constexpr, PART: tl.constexpr,
    BLOCK_SIZE: tl.constexpr, BLOCK_HEADS: tl.constexpr, KEYS: tl.constexpr, BLOCK_LATENT: tl.constexpr,
    BLOCK_PART: tl.constexpr, HAS_LATENT: tl.constexpr, SPLITS: tl.constexpr, WIDEN_DOT: tl.constexpr,
):  # fmt: skip
    heads_of_group: tl.constexpr = HEADS // GROUPS
    tiles_of_group: tl.constexpr = (heads_of_group + BLOCK_HEADS - 1) // BLOCK_HEADS
    width: tl.constexpr = LATENT + PART * GROUPS
    sequence = tl.program_id(0).to(tl.int64)
    group = tl.program_id(1) // tiles_of_group
    split = tl.program_id(2)
    in_group = tl.program_id(1) % tiles_of_group * BLOCK_HEADS + tl.arange(0, BLOCK_HEADS)
    is_head = in_group < heads_of_group
    head = (group * heads_of_group + in_group).to(tl.int64)
    at, part_at, step = tl.arange(0, BLOCK_LATENT), tl.arange(0, BLOCK_PART), tl.arange(0, KEYS)
    is_latent, is_part = at < LATENT, part_at < PART
    place = query_rope + sequence * rope_stride + head[:, None] * rope_head_stride + part_at[None, :]
    rope = tl.load(place, mask=is_head[:, None] & is_part[None, :], other=0.0)
    if HAS_LATENT:
        place = query_latent + sequence * latent_stride + head[:, None] * latent_head_stride + at[None, :]
        latent_query = tl.load(place, mask=is_head[:, None] & is_latent[None, :], other=0.0)

    length = tl.load(kv_lens + sequence)
    part = tl.cdiv(tl.cdiv(length, SPLITS), KEYS) * KEYS
    top = tl.full((BLOCK_HEADS,), float("-inf"), dtype=tl.float32)
    mass = tl.zeros((BLOCK_HEADS,), dtype=tl.float32)
    total = tl.zeros((BLOCK_HEADS, BLOCK_LATENT), dtype=tl.float32)
    for start in range(split * part, tl.minimum(length, split * part + part), KEYS):
        position = start + step
        is_key = position < length
        block = tl.load(tables + sequence * max_blocks + position // BLOCK_SIZE, mask=is_key, other=0)
        row = cache + (block.to(tl.int64) * BLOCK_SIZE + position % BLOCK_SIZE) * width
        latent = tl.load(row[:, None] + at[None, :], mask=is_key[:, None] & is_latent[None, :], other=0.0)
        key_at = row[None, :] + LATENT + group * PART + part_at[:, None]
        keys = tl.load(key_at, mask=is_part[:, None] & is_key[None, :], other=0.0)
        scores = dot(rope, keys, WIDEN_DOT)
        if HAS_LATENT:
            scores += dot(latent_query, tl.trans(latent), WIDEN_DOT)
        scores = tl.where(is_key[None, :], scores * scale, float("-inf"))
        # Every step has a key, so the largest score is a number.
        highest = tl.maximum(top, tl.max(scores, 1))
        weights = tl.exp2(scores - highest[:, None])
        fade = tl.exp2(top - highest)
        mass = mass * fade + tl.sum(weights, 1)
        total = total * fade[:, None] + dot(weights.to(latent.dtype), latent, WIDEN_DOT)
        top = highest
    total = total / tl.where(mass > 0.0, mass, 1.0)[:, None]
    line = sequence * HEADS + head
    inside = is_head[:, None] & is_latent[None, :]
    if SPLITS == 1:
        tl.store(out + line[:, None] * LATENT + at[None, :], total.to(out.dtype.element_ty), mask=inside)
    else:
        line = line * SPLITS + split
        tl.store(part_sums + line[:, None] * LATENT + at[None, :], total, mask=inside)
        log = tl.where(mass > 0.0, top + tl.log2(tl.where(mass > 0.0, mass, 1.0)), float("-inf"))
        tl.store(part_logs + line, log, mask=is_head)


@triton.jit
def gather_rows(cache, table, out, BLOCK_SIZE: tl.constexpr, WIDTH: tl.constexpr, BLOCK: tl.constexpr):
    row = tl.program_id(0)
    at = tl.arange(0, BLOCK)
    block = tl.load(table + row // BLOCK_SIZE).to(tl.int64)
    elements = tl.load(cache + (block * BLOCK_SIZE + row % BLOCK_SIZE) * WIDTH + at, mask=at < WIDTH)
    tl.store(out + row.to(tl.int64) * WIDTH + at, elements, mask=at < WIDTH)


def paged_mla_decode(
    query_latent: Tensor | None, query_rope: Tensor, cache: Tensor, block_tables: Tensor, kv_lens: Tensor,
    scale: float, *, rope_groups: int = 1, tile: Tile | None = None, splits: int | None = None,
    launch: Launcher = launch_now,
) -> Tensor:  # fmt: skip
    """See :func:`kernels.paged_mla.paged_mla_decode`; ``tile`` and ``splits`` override the table."""
    sequences, heads, part = query_rope.shape
    block_size, max_blocks = cache.shape[1], block_tables.shape[1]
    latent = cache.shape[2] - part * rope_groups
    chosen = tile or (tiles.MLA_DECODE if latent <= 512 else tiles.MLA_DECODE_WIDE)
    block_heads = min(chosen.rows, power_of_two(heads // rope_groups, 16))
    num_tiles = rope_groups * triton.cdiv(heads // rope_groups, block_heads)
    parts = splits or pick_splits(sequences * num_tiles, max_blocks * block_size, chosen.columns)
    out = torch.empty((sequences, heads, latent), dtype=query_rope.dtype, device=query_rope.device)
    sums = logs = out
    if parts > 1:
        sums = torch.empty((sequences, heads, parts, latent), dtype=torch.float32, device=out.device)
        logs = torch.empty((sequences, heads, parts), dtype=torch.float32, device=out.device)
    absorbed = query_rope if query_latent is None else query_latent
    launch(
        attend_latents, (sequences, num_tiles, parts),
        num_warps=chosen.num_warps, num_stages=chosen.num_stages,
        query_latent=absorbed, query_rope=query_rope, cache=cache, tables=block_tables, kv_lens=kv_lens,
        out=out, part_sums=sums, part_logs=logs, scale=scale * LOG2_E,
        latent_stride=absorbed.stride(0), latent_head_stride=absorbed.stride(1),
        rope_stride=query_rope.stride(0), rope_head_stride=query_rope.stride(1), max_blocks=max_blocks,
        HEADS=heads, GROUPS=rope_groups, LATENT=latent, PART=part, BLOCK_SIZE=block_size,
        BLOCK_HEADS=block_heads, KEYS=chosen.columns, BLOCK_LATENT=power_of_two(latent, 16),
        BLOCK_PART=power_of_two(part, 16), HAS_LATENT=query_latent is not None, SPLITS=parts,
        WIDEN_DOT=is_interpreted(),
    )  # fmt: skip
    if parts > 1:
        combine(sums, logs, out, launch)
    return out


def gather_latent(
    cache: Tensor, block_table: Tensor, length: int, *, launch: Launcher = launch_now
) -> Tensor:
    """See :func:`kernels.paged_mla.gather_latent`."""
    _, block_size, width = cache.shape
    out = torch.empty((length, width), dtype=cache.dtype, device=cache.device)
    launch(
        gather_rows, (length,), num_warps=2,
        cache=cache, table=block_table, out=out, BLOCK_SIZE=block_size, WIDTH=width,
        BLOCK=power_of_two(width),
    )  # fmt: skip
    return out
