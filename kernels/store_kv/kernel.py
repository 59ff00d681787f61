"""Triton forms of the cache writes: one program a token (and KV head)."""

from __future__ import annotations

import triton
import triton.language as tl
from torch import Tensor

from kernels.launching import Launcher, launch_now
from kernels.tiles import power_of_two


@triton.jit
def store_keys_and_values(
    key, value, key_cache, value_cache, slots, key_stride, key_head_stride, value_stride, value_head_stride,
    HEADS: tl.constexpr, DIM: tl.constexpr, VALUE_DIM: tl.constexpr, BLOCK_SIZE: tl.constexpr,
    BLOCK_DIM: tl.constexpr, BLOCK_VALUE: tl.constexpr,
):  # fmt: skip
    token = tl.program_id(0).to(tl.int64)
    head = tl.program_id(1).to(tl.int64)
    # A slot is 64 bits wide: caches are larger than 2**31 elements.
    slot = tl.load(slots + token)
    block = slot // BLOCK_SIZE
    offset = slot % BLOCK_SIZE
    row = block * HEADS + head
    at = tl.arange(0, BLOCK_DIM)
    elements = tl.load(key + token * key_stride + head * key_head_stride + at, mask=at < DIM)
    tl.store(key_cache + row * (DIM * BLOCK_SIZE) + at * BLOCK_SIZE + offset, elements, mask=at < DIM)
    at = tl.arange(0, BLOCK_VALUE)
    elements = tl.load(value + token * value_stride + head * value_head_stride + at, mask=at < VALUE_DIM)
    place = value_cache + (row * BLOCK_SIZE + offset) * VALUE_DIM + at
    tl.store(place, elements, mask=at < VALUE_DIM)


@triton.jit
def store_latents(
    latent, rope_key, cache, slots, latent_stride, rope_stride,
    LATENT: tl.constexpr, ROPE: tl.constexpr, BLOCK_LATENT: tl.constexpr, BLOCK_ROPE: tl.constexpr,
):  # fmt: skip
    token = tl.program_id(0).to(tl.int64)
    row = cache + tl.load(slots + token) * (LATENT + ROPE)
    at = tl.arange(0, BLOCK_LATENT)
    elements = tl.load(latent + token * latent_stride + at, mask=at < LATENT)
    tl.store(row + at, elements, mask=at < LATENT)
    at = tl.arange(0, BLOCK_ROPE)
    elements = tl.load(rope_key + token * rope_stride + at, mask=at < ROPE)
    tl.store(row + LATENT + at, elements, mask=at < ROPE)


def store_kv(
    key: Tensor, value: Tensor, key_cache: Tensor, value_cache: Tensor, slots: Tensor,
    *, launch: Launcher = launch_now,
) -> None:  # fmt: skip
    """See :func:`kernels.store_kv.store_kv`."""
    tokens, heads, dim = key.shape
    value_dim = value.shape[2]
    launch(
        store_keys_and_values, (tokens, heads), num_warps=1,
        key=key, value=value, key_cache=key_cache, value_cache=value_cache, slots=slots,
        key_stride=key.stride(0), key_head_stride=key.stride(1), value_stride=value.stride(0),
        value_head_stride=value.stride(1), HEADS=heads, DIM=dim, VALUE_DIM=value_dim,
        BLOCK_SIZE=key_cache.shape[3], BLOCK_DIM=power_of_two(dim), BLOCK_VALUE=power_of_two(value_dim),
    )  # fmt: skip


def store_latent(
    latent: Tensor, rope_key: Tensor, cache: Tensor, slots: Tensor, *, launch: Launcher = launch_now
) -> None:
    """See :func:`kernels.store_kv.store_latent`."""
    tokens, width = latent.shape
    rope = rope_key.shape[1]
    launch(
        store_latents, (tokens,), num_warps=2,
        latent=latent, rope_key=rope_key, cache=cache, slots=slots,
        latent_stride=latent.stride(0), rope_stride=rope_key.stride(0),
        LATENT=width, ROPE=rope, BLOCK_LATENT=power_of_two(width), BLOCK_ROPE=power_of_two(rope),
    )  # fmt: skip
