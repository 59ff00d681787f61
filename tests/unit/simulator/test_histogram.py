"""Percentiles out of buckets are as near as they say."""

from __future__ import annotations

import random

import pytest

from simulator.histogram import RELATIVE_ERROR, Histogram


@pytest.mark.parametrize("count", [1, 2, 7, 5000])
def test_percentiles_are_those_of_the_sorted_values(count: int) -> None:
    source = random.Random(count)
    values = sorted(source.lognormvariate(-2.0, 2.0) for _ in range(count))
    histogram = Histogram()
    for value in values:
        histogram.add(value)
    wanted = (1, 50, 90, 99, 100)
    exact = [values[max(0, -(-count * percent // 100) - 1)] for percent in wanted]
    assert histogram.percentiles(wanted) == pytest.approx(exact, rel=RELATIVE_ERROR * 1.001)


def test_no_time_and_no_values() -> None:
    histogram = Histogram()
    assert histogram.percentiles((50, 99)) == [0.0, 0.0]
    histogram.add(0.0)
    assert histogram.percentiles((50,))[0] < 1.1e-6
