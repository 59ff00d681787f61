"""Routers that tests and benchmarks share."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class GateCase:
    name: str
    experts: int
    top_k: int
    num_groups: int = 1
    top_groups: int = 1
    normalise: bool = True
    scale: float = 1.0


CASES = (
    GateCase("embedded", 36, 36, scale=36.0),
    GateCase("embedded, sparse", 36, 30),
    GateCase("kimi", 384, 8, scale=2.827),
    GateCase("groups", 64, 6, num_groups=8, top_groups=3, scale=2.5),
    GateCase("groups of one", 5, 2, num_groups=5, top_groups=3),
    GateCase("not normalised", 17, 4, normalise=False),
)
