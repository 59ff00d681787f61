"""Trials of the cache writes."""

from __future__ import annotations

from functools import partial

from torch import Tensor

from kernels.launching import Launcher
from kernels.store_kv import kernel, reference
from kernels.trial import Prepared, Setting, Trial


def prepare_kv(
    setting: Setting, *, tokens: int, heads: int, dim: int, value_dim: int, block_size: int
) -> Prepared:
    """Keys and values lie side by side, as a fused projection leaves them; what is not written must stay."""
    fused = setting.normal(tokens, heads, dim + value_dim)
    key, value = fused[..., :dim], fused[..., dim:]
    blocks = -(-tokens // block_size) + 2
    slots = setting.shuffled(blocks * block_size)[:tokens].long()
    keys = setting.normal(blocks, heads, dim, block_size)
    values = setting.normal(blocks, heads, block_size, value_dim)

    def run(launch: Launcher) -> tuple[Tensor, Tensor]:
        kernel.store_kv(key, value, keys, values, slots, launch=launch)
        return keys, values

    def expect() -> tuple[Tensor, Tensor]:
        caches = keys.clone(), values.clone()
        reference.store_kv(key, value, *caches, slots)
        return caches

    return Prepared(run, expect, 2 * fused.nbytes + slots.nbytes)


def prepare_latent(setting: Setting, *, tokens: int, latent: int, rope: int, block_size: int) -> Prepared:
    """As :func:`prepare_kv`, for latents."""
    fused = setting.normal(tokens, latent + rope)
    blocks = -(-tokens // block_size) + 2
    slots = setting.shuffled(blocks * block_size)[:tokens].long()
    cache = setting.normal(blocks, block_size, latent + rope)

    def run(launch: Launcher) -> tuple[Tensor]:
        kernel.store_latent(fused[:, :latent], fused[:, latent:], cache, slots, launch=launch)
        return (cache,)

    def expect() -> tuple[Tensor]:
        copy = cache.clone()
        reference.store_latent(fused[:, :latent], fused[:, latent:], copy, slots)
        return (copy,)

    return Prepared(run, expect, 2 * fused.nbytes + slots.nbytes)


SMALL = (
    Trial("store_kv", "keys and values", partial(
        prepare_kv, tokens=5, heads=3, dim=24, value_dim=20, block_size=8)),
    Trial("store_kv", "latents", partial(prepare_latent, tokens=7, latent=48, rope=20, block_size=4)),
)  # fmt: skip
REAL = (
    Trial("store_kv", "8192 x 8 heads of 128", partial(
        prepare_kv, tokens=8192, heads=8, dim=128, value_dim=128, block_size=64)),
    Trial("store_kv", "latents 8192 x (512 + 64)", partial(
        prepare_latent, tokens=8192, latent=512, rope=64, block_size=64)),
)  # fmt: skip
