"""Plain torch forms of the cache writes."""

from __future__ import annotations

from torch import Tensor


def store_kv(key: Tensor, value: Tensor, key_cache: Tensor, value_cache: Tensor, slots: Tensor) -> None:
    """See :func:`kernels.store_kv.store_kv`."""
    block_size = key_cache.shape[3]
    blocks, offsets = slots // block_size, slots % block_size
    key_cache[blocks, :, :, offsets] = key
    value_cache[blocks, :, offsets] = value


def store_latent(latent: Tensor, rope_key: Tensor, cache: Tensor, slots: Tensor) -> None:
    """See :func:`kernels.store_kv.store_latent`."""
    rows = cache.view(-1, cache.shape[2])
    width = latent.shape[1]
    rows[slots, :width] = latent
    rows[slots, width:] = rope_key
