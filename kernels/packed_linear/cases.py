"""Shapes of products with packed weights that tests and benchmarks share."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

import torch

from kernels.packed_linear.weight import GROUP, PackedWeight


@dataclass(frozen=True, slots=True)
class LinearCase:
    """A weight ``[out_features, in_features]`` held in ``bits``; ``is_wide``: scales that float16 cannot
    hold."""

    name: str
    out_features: int
    in_features: int
    bits: Literal[4, 8, 16, 32]
    is_wide: bool = False

    def weight(self, seed: int = 0) -> PackedWeight:
        """A random weight of about unit row norm, reproducible."""
        rng = torch.Generator().manual_seed(seed)
        shape, spread = (self.out_features, self.in_features), self.in_features**-0.5
        if self.bits == 16 or self.bits == 32:
            dense = torch.randn(shape, generator=rng) * spread
            return PackedWeight.from_dense(dense.bfloat16() if self.bits == 16 else dense)
        groups = (self.out_features, self.in_features // GROUP)
        top = 2**self.bits - 1
        codes = torch.randint(0, top + 1, shape, generator=rng, dtype=torch.uint8)
        scales = (torch.rand(groups, generator=rng) + 0.5) * spread * 3 / top
        minima = -scales * top / 2 + torch.randn(groups, generator=rng) * spread / 8
        if not self.is_wide:
            scales, minima = scales.half(), minima.half()
        return PackedWeight.pack(codes, scales, minima, self.bits)


SMOLLM2 = (
    LinearCase("qkv", 960, 576, 4),
    LinearCase("o", 576, 576, 4),
    LinearCase("gate_up", 3072, 576, 4),
    LinearCase("down", 576, 1536, 4),
)
HEAD = LinearCase("head", 49152, 576, 8)
EDGES = (
    LinearCase("narrow", 7, 32, 4),
    LinearCase("odd rows", 33, 96, 8),
    LinearCase("wide scales", 100, 64, 4, is_wide=True),
    LinearCase("wide scales, bytes", 65, 160, 8, is_wide=True),
    LinearCase("bfloat16", 70, 34, 16),
    LinearCase("float32", 36, 57, 32),
    LinearCase("router", 36, 576, 32),
)
ROWS = tuple(range(1, 34))
