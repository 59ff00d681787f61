"""Sums behind the metrics: plain integers, because a request can afford additions but no label look-ups.

What a scraper asks for is derived from these when it asks.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Iterator
from itertools import accumulate

from prometheus_client.core import HistogramMetricFamily
from prometheus_client.utils import floatToGoString

from billing.rates import Charge
from billing.usage import UsageRecord

OTHER_ACCOUNTS = "other"

RecordKey = tuple[str, str, str, str, bool]
"""Account label, model, replica, status, is_estimated."""


class RecordTally:
    """Sums over the usage records of one key."""

    __slots__ = (
        "amount_nanos",
        "cached_prompt_tokens",
        "completion_tokens",
        "num_mispredicted",
        "num_records",
        "num_retries",
        "predicted_cached_tokens",
        "prompt_tokens",
    )

    def __init__(self) -> None:
        self.num_records = 0
        self.prompt_tokens = 0
        self.cached_prompt_tokens = 0
        self.completion_tokens = 0
        self.amount_nanos = 0
        self.num_retries = 0
        self.predicted_cached_tokens = 0
        self.num_mispredicted = 0


class RecordTallies:
    """Tallies by key. Accounts beyond the first ``max_accounts`` share one label."""

    def __init__(self, max_accounts: int) -> None:
        self._max_accounts = max_accounts
        self._accounts: set[str] = set()
        self._tallies: dict[RecordKey, RecordTally] = {}

    def add(self, record: UsageRecord, charge: Charge, predicted_cached_tokens: int) -> None:
        key = (record.account_id, record.model, record.replica_id, record.status, record.is_estimated)
        tally = self._tallies.get(key) or self._tally_of(key)
        tally.num_records += 1
        tally.prompt_tokens += record.prompt_tokens
        tally.cached_prompt_tokens += record.cached_prompt_tokens
        tally.completion_tokens += record.completion_tokens
        tally.amount_nanos += charge.amount_nanos
        if record.num_attempts > 1:
            tally.num_retries += record.num_attempts - 1
        if predicted_cached_tokens:
            tally.predicted_cached_tokens += predicted_cached_tokens
            tally.num_mispredicted += record.cached_prompt_tokens < predicted_cached_tokens // 2

    def items(self) -> Iterator[tuple[RecordKey, RecordTally]]:
        yield from self._tallies.items()

    def _tally_of(self, key: RecordKey) -> RecordTally:
        account_id = key[0]
        if account_id not in self._accounts:
            if len(self._accounts) < self._max_accounts:
                self._accounts.add(account_id)
            else:
                key = (OTHER_ACCOUNTS, *key[1:])
        return self._tallies.setdefault(key, RecordTally())


class LightHistogram:
    """Observations by bucket; cumulated when read."""

    __slots__ = ("_bounds", "_counts", "_sum")

    def __init__(self, bounds: tuple[float, ...]) -> None:
        self._bounds = bounds
        self._counts = [0] * (len(bounds) + 1)
        self._sum = 0.0

    def observe(self, value: float) -> None:
        self._counts[bisect_left(self._bounds, value)] += 1
        self._sum += value

    def add_to(self, family: HistogramMetricFamily, labels: list[str]) -> None:
        """Add what was observed as one labelled metric."""
        bounds = [*map(floatToGoString, self._bounds), "+Inf"]
        family.add_metric(labels, list(zip(bounds, accumulate(self._counts), strict=True)), self._sum)
