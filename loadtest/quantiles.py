"""Medians and tails."""

from __future__ import annotations

import statistics
from collections.abc import Sequence

import msgspec


class Quantiles(msgspec.Struct, frozen=True):
    """In the unit of the values; all 0 without any."""

    p50: float
    p90: float
    p99: float


def quantiles(values: Sequence[float]) -> Quantiles:
    """Interpolated between neighbours."""
    if not values:
        return Quantiles(0.0, 0.0, 0.0)
    if len(values) == 1:
        return Quantiles(values[0], values[0], values[0])
    cuts = statistics.quantiles(values, n=100, method="inclusive")
    return Quantiles(cuts[49], cuts[89], cuts[98])
