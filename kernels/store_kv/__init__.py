"""Writing keys and values, or latents, of new tokens into the paged cache.

Layouts. Keys: ``[blocks, kv_heads, head_dim, block_size]``, so that the tokens of a block lie along the
vector lanes when scores are computed. Values: ``[blocks, kv_heads, block_size, head_dim]``. Latents (MLA):
``[blocks, block_size, latent + rope]``. A slot is ``block * block_size + offset``.
"""

from __future__ import annotations

from torch import Tensor

from kernels.dispatch import takes_triton
from kernels.native import NativeLibrary, address
from kernels.store_kv import reference


def store_kv(
    key: Tensor,
    value: Tensor,
    key_cache: Tensor,
    value_cache: Tensor,
    slots: Tensor,
    *,
    native: NativeLibrary | None = None,
) -> None:
    """Write one key and one value per token and KV head into its slot.

    Args:
        key: ``[tokens, kv_heads, head_dim]``; tokens may be strided (a slice of a fused projection).
        value: ``[tokens, kv_heads, value_dim]``; likewise.
        key_cache: ``[blocks, kv_heads, head_dim, block_size]``, contiguous.
        value_cache: ``[blocks, kv_heads, block_size, value_dim]``, contiguous.
        slots: ``[tokens]`` int64, each below ``blocks * block_size``.

    Raises:
        ValueError: when shapes do not fit together, or the native form is given other tensors than float32
            ones on the CPU. Slots are not checked one by one.
    """
    tokens, heads, dim = key.shape
    blocks, _, _, block_size = key_cache.shape
    value_dim = value.shape[2]
    if key_cache.shape[1:3] != (heads, dim) or value_cache.shape != (blocks, heads, block_size, value_dim):
        raise ValueError(
            f"caches {list(key_cache.shape)}, {list(value_cache.shape)} do not fit {list(key.shape)}"
        )
    if takes_triton("store_kv", key):
        from kernels.store_kv import kernel

        return kernel.store_kv(key, value, key_cache, value_cache, slots)
    if native is None:
        return reference.store_kv(key, value, key_cache, value_cache, slots)
    native.store_kv(
        address("key", key, key.shape, strided_rows=True), key.stride(0),
        address("value", value, (tokens, heads, value_dim), strided_rows=True), value.stride(0),
        address("key_cache", key_cache, key_cache.shape), address("value_cache", value_cache,
        value_cache.shape), slots.data_ptr(), tokens, heads, dim, value_dim, block_size,
    )  # fmt: skip
    return None


def store_latent(
    latent: Tensor, rope_key: Tensor, cache: Tensor, slots: Tensor, *, native: NativeLibrary | None = None
) -> None:
    """Write the latent and the rotated rope key of each token into its slot of the MLA cache.

    Args:
        latent: ``[tokens, latent]``; tokens may be strided.
        rope_key: ``[tokens, rope]``; likewise.
        cache: ``[blocks, block_size, latent + rope]``, contiguous.
        slots: ``[tokens]`` int64.

    Raises:
        ValueError: as :func:`store_kv`.
    """
    tokens, width = latent.shape
    rope_width = rope_key.shape[1]
    if cache.shape[2] != width + rope_width or rope_key.shape[0] != tokens:
        raise ValueError(
            f"cache {list(cache.shape)} does not fit latents of {width} and rope keys of {rope_width}"
        )
    if takes_triton("store_kv", latent):
        from kernels.store_kv import kernel

        return kernel.store_latent(latent, rope_key, cache, slots)
    if native is None:
        return reference.store_latent(latent, rope_key, cache, slots)
    native.store_latent(
        address("latent", latent, latent.shape, strided_rows=True), latent.stride(0),
        address("rope_key", rope_key, rope_key.shape, strided_rows=True), rope_key.stride(0),
        address("cache", cache, cache.shape), slots.data_ptr(), tokens, width, rope_width,
    )  # fmt: skip
    return None
