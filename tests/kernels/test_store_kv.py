from __future__ import annotations

import pytest
import torch

from kernels.native import NativeLibrary
from kernels.store_kv import store_kv, store_latent


@pytest.mark.parametrize("tokens", [1, 7])
def test_keys_and_values_land_in_their_slots(tokens: int, native: NativeLibrary) -> None:
    fused = torch.randn(tokens, 3 * 64 + 3 * 32 + 8)
    key, value = fused[:, :192].view(tokens, 3, 64), fused[:, 192:288].view(tokens, 3, 32)
    slots = torch.randperm(5 * 16)[:tokens]
    caches = [torch.full((5, 3, 64, 16), 9.0), torch.full((5, 3, 16, 32), 9.0)]
    expected = [cache.clone() for cache in caches]
    store_kv(key, value, *expected, slots)
    store_kv(key, value, *caches, slots, native=native)
    assert torch.equal(caches[0], expected[0])
    assert torch.equal(caches[1], expected[1])
    block, offset = divmod(int(slots[0]), 16)
    assert torch.equal(caches[0][block, :, :, offset], key[0])
    assert torch.equal(caches[1][block, :, offset], value[0])


@pytest.mark.parametrize("tokens", [1, 7])
def test_latents_land_in_their_slots(tokens: int, native: NativeLibrary) -> None:
    latent, rope_key = torch.randn(tokens, 96), torch.randn(tokens, 100)[:, 4:36]
    slots = torch.randperm(5 * 16)[:tokens]
    cache = torch.full((5, 16, 128), 9.0)
    expected = cache.clone()
    store_latent(latent, rope_key, expected, slots)
    store_latent(latent, rope_key, cache, slots, native=native)
    assert torch.equal(cache, expected)
    assert torch.equal(cache.view(-1, 128)[slots[0]], torch.cat((latent[0], rope_key[0])))


def test_caches_of_another_shape_are_refused() -> None:
    slots = torch.zeros(1, dtype=torch.int64)
    with pytest.raises(ValueError, match="do not fit"):
        store_kv(
            torch.zeros(1, 3, 64),
            torch.zeros(1, 3, 64),
            torch.zeros(5, 3, 16, 64),
            torch.zeros(5, 3, 16, 64),
            slots,
        )
    with pytest.raises(ValueError, match="does not fit"):
        store_latent(torch.zeros(1, 96), torch.zeros(1, 32), torch.zeros(5, 16, 127), slots)
