"""Percentiles of millions of durations in a few kilobytes: counts in buckets that grow by one percent."""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Sequence

_GROWTH = 1.01
_STEPS = 1.0 / math.log(_GROWTH)
_LEAST_S = 1e-6

RELATIVE_ERROR = math.sqrt(_GROWTH) - 1.0
"""A percentile is off by this share of itself at most (half a percent), beside ranks being whole."""


class Histogram:
    """Seconds, counted. What is below a microsecond counts as one."""

    __slots__ = ("_counts", "num_values")

    def __init__(self) -> None:
        self._counts: defaultdict[int, int] = defaultdict(int)
        self.num_values = 0

    def add(self, value_s: float) -> None:
        """Count one value."""
        self._counts[math.floor(math.log(value_s if value_s > _LEAST_S else _LEAST_S) * _STEPS)] += 1
        self.num_values += 1

    def percentiles(self, wanted: Sequence[float]) -> list[float]:
        """The values that ``wanted`` percent (ascending) do not exceed, by nearest rank; 0 for none."""
        if not self.num_values:
            return [0.0] * len(wanted)
        found: list[float] = []
        passed = 0
        ordered = iter(sorted(self._counts.items()))
        bucket = 0
        for percent in wanted:
            rank = max(1, math.ceil(self.num_values * percent / 100.0))
            while passed < rank:
                bucket, count = next(ordered)
                passed += count
            found.append(math.exp((bucket + 0.5) / _STEPS))
        return found
