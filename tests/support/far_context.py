"""A long context that nobody has to compute: cache rows made up, in our cache's form and in transformers'."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor
from transformers import PreTrainedModel
from transformers.cache_utils import DynamicCache

from backend.model.context import LayerCache


@dataclass(frozen=True, slots=True)
class FarContext:
    """``length`` tokens of context of every layer: latents as a norm leaves them, and keys that the reference
    model's own rotary embedding has rotated, each at its position.

    ``rows``: per layer ``[length, latent + rope]`` float32, rotated pairs side by side as our cache has them.
    """

    length: int
    latent_width: int
    rows: tuple[Tensor, ...]

    @classmethod
    def make(cls, reference: PreTrainedModel, length: int, seed: int = 0) -> FarContext:
        config = reference.config
        latent, rope = config.kv_lora_rank, config.qk_rope_head_dim
        rng = torch.Generator().manual_seed(seed)
        cos, sin = reference.model.rotary_emb(torch.zeros(1), torch.arange(length)[None])
        cos, sin = cos[0, :, : rope // 2].float(), sin[0, :, : rope // 2].float()
        rows = []
        for _ in range(config.num_hidden_layers):
            row = torch.randn((length, latent + rope), generator=rng)
            first, second = row[:, latent::2].clone(), row[:, latent + 1 :: 2].clone()
            row[:, latent::2] = first * cos - second * sin
            row[:, latent + 1 :: 2] = first * sin + second * cos
            rows.append(row)
        return cls(length, latent, tuple(rows))

    def write_to(self, caches: Sequence[LayerCache], block_table: Sequence[int], block_size: int) -> None:
        """Put the rows where a sequence with that block table would have left them."""
        at = torch.arange(self.length)
        slots = torch.tensor(block_table)[at // block_size] * block_size + at % block_size
        for (cache,), rows in zip(caches, self.rows, strict=True):
            cache.view(-1, cache.shape[2])[slots] = rows

    def as_reference_cache(self, dtype: torch.dtype) -> DynamicCache:
        """The same for transformers, which keeps the two halves of rotated pairs apart."""
        cache = DynamicCache()
        for layer, rows in enumerate(self.rows):
            key = rows[:, self.latent_width :].to(dtype)
            halves = torch.cat((key[:, 0::2], key[:, 1::2]), dim=1)
            cache.update(rows[None, None, :, : self.latent_width].to(dtype), halves[None, None], layer)
        return cache


def continue_in_float64(reference: PreTrainedModel, context: FarContext, token_ids: Sequence[int]) -> Tensor:
    """Logits of tokens that follow the context, by the reference model turned to float64.

    Its rotary angles, its norms and its router stay float32, as they are in every form of that code.
    """
    wide = reference.to(torch.float64)
    wide.config._experts_implementation = "eager"  # the grouped one knows no float64
    positions = torch.arange(context.length, context.length + len(token_ids))
    with torch.no_grad():
        cache = context.as_reference_cache(torch.float64)
        out = wide(torch.tensor([list(token_ids)]), cache=cache, position_ids=positions[None])
    logits: Tensor = out.logits[0]
    return logits
