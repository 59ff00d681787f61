"""Latencies as counts in fixed buckets, which can be added up in any order and rebuilt exactly.

One scale serves every metric: bounds grow by the eighth root of two, so a percentile, read off the middle of
its bucket, is within 4.5 % of the true value. Values are positive integers: microseconds for the time to the
first token, thousandths of a token a second for the speed after it.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Iterable, Iterator
from itertools import accumulate
from typing import Any, Literal

import msgspec
from sqlalchemy import Row

from billing.usage import CHARGED_STATUSES, UsageRecord

Metric = Literal["ttft_us", "speed_milli"]

_STEPS_PER_OCTAVE = 8
_NUM_OCTAVES = 40
_MILLI_PER_MICRO = 1_000 * 1_000_000
_MIN_TOKEN_US = 500
"""No model gives one sequence 2,000 tokens a second: what says so is an answer that came in one piece."""

BOUNDS: tuple[int, ...] = tuple(
    sorted({round(2 ** (step / _STEPS_PER_OCTAVE)) for step in range(_STEPS_PER_OCTAVE * _NUM_OCTAVES + 1)})
)
"""Upper bounds, inclusive, of all buckets but the last."""


class LatencySummary(msgspec.Struct, frozen=True, kw_only=True):
    """Percentiles of streams: milliseconds to the first token, tokens a second after it.

    The p90 of either is what nine of ten streams keep: they waited no longer, they were no slower. None where
    there was no such request. ``num_*`` says how many there were.
    """

    num_ttft: int = 0
    ttft_ms_p50: float | None = None
    ttft_ms_p90: float | None = None
    ttft_ms_p99: float | None = None
    num_speed: int = 0
    tokens_per_second_p50: float | None = None
    tokens_per_second_p90: float | None = None
    tokens_per_second_p99: float | None = None


def bucket_of(value: int) -> int:
    """The bucket of a positive value."""
    return bisect_left(BOUNDS, value)


def latencies_of(record: UsageRecord | Row[Any]) -> Iterator[tuple[Metric, int]]:
    """What a record says about latency: nothing when it failed, gave no token or came in one piece.

    An answer in one piece has no time to its first token. Records were once given that of all of it instead;
    those are known by a rest of the answer that took no time.
    """
    num_tokens = record.completion_tokens
    if record.ttft_us <= 0 or num_tokens <= 0 or record.status not in CHARGED_STATUSES:
        return
    rest_us = record.finished_at_us - record.started_at_us - record.ttft_us
    num_rest = num_tokens - 1
    if num_rest and rest_us < num_tokens * _MIN_TOKEN_US:
        return
    yield "ttft_us", record.ttft_us
    if num_rest:
        yield "speed_milli", max(num_rest * _MILLI_PER_MICRO // rest_us, 1)


def percentile(counts: Iterable[tuple[int, int]], share: float) -> float:
    """The value that ``share`` of what ``(bucket, count)`` hold does not exceed; the middle of its bucket.

    The slow end of a speed is its low one: ask for ``1 - share`` there. Raises ValueError when all is empty.
    """
    ordered = sorted(counts)
    total = sum(count for _, count in ordered)
    if total <= 0:
        raise ValueError("no latencies to take a percentile of")
    passed = accumulate(count for _, count in ordered)
    index = bisect_left(list(passed), max(share * total, 1))
    return _middle_of(ordered[min(index, len(ordered) - 1)][0])


def summarize(ttft: dict[int, int], speed: dict[int, int]) -> LatencySummary:
    """Percentiles of two histograms, bucket to count. The speed that 90 % of requests reach is its p90."""
    summary = LatencySummary(num_ttft=sum(ttft.values()), num_speed=sum(speed.values()))
    if summary.num_ttft:
        p50, p90, p99 = (round(percentile(ttft.items(), share) / 1_000, 3) for share in (0.5, 0.9, 0.99))
        summary = msgspec.structs.replace(summary, ttft_ms_p50=p50, ttft_ms_p90=p90, ttft_ms_p99=p99)
    if summary.num_speed:
        p50, p90, p99 = (round(percentile(speed.items(), share) / 1_000, 3) for share in (0.5, 0.1, 0.01))
        summary = msgspec.structs.replace(
            summary, tokens_per_second_p50=p50, tokens_per_second_p90=p90, tokens_per_second_p99=p99
        )
    return summary


def _middle_of(bucket: int) -> float:
    low = BOUNDS[bucket - 1] if bucket else 0
    high = BOUNDS[min(bucket, len(BOUNDS) - 1)]
    return (low + high) / 2 if bucket < len(BOUNDS) and high - low > 1 else float(high)
