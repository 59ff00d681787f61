"""Mixtures of experts that tests and benchmarks share."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from kernels.packed_linear.cases import LinearCase
from kernels.packed_linear.weight import PackedWeight


@dataclass(frozen=True, slots=True)
class ExpertCase:
    name: str
    hidden: int
    width: int
    num_experts: int
    top_k: int
    bits: Literal[4, 8, 16, 32] = 4

    def packed(self) -> tuple[PackedWeight, PackedWeight]:
        """Random ``gate_up`` and ``down``."""
        stacked = self.num_experts * self.width
        gate_up = LinearCase("gate_up", 2 * stacked, self.hidden, self.bits).weight(1)
        return gate_up, LinearCase("down", self.hidden, stacked, self.bits).weight(2)


CASES = (
    ExpertCase("embedded", 576, 32, 36, 36),
    ExpertCase("embedded, sparse", 576, 32, 36, 30),
    ExpertCase("few of many", 96, 64, 24, 3),
    ExpertCase("bytes", 64, 32, 6, 2, bits=8),
    ExpertCase("bfloat16, odd width of the hidden state", 70, 32, 5, 2, bits=16),
)
