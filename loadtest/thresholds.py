"""What a run of locust must meet, from its statistics."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Protocol


class Entry(Protocol):
    """What is used of locust's statistics of one kind of request."""

    @property
    def num_requests(self) -> int: ...
    @property
    def num_failures(self) -> int: ...
    @property
    def avg_response_time(self) -> float: ...
    def get_response_time_percentile(self, percent: float) -> float: ...


@dataclass(frozen=True)
class Thresholds:
    """Bars. 0 for a time or a share means none. Times in ms, shares between 0 and 1."""

    max_fail_ratio: float = 0.0
    max_ttft_p95_ms: float = 0.0
    min_cached_share: float = 0.0

    def missed(self, entries: Mapping[tuple[str, str], Entry]) -> list[str]:
        """What was not met. ``entries`` are keyed by name and kind."""
        missed = []
        requests = [entry for (_, kind), entry in entries.items() if kind == "POST"]
        num_requests = sum(entry.num_requests for entry in requests)
        num_failures = sum(entry.num_failures for entry in requests)
        if num_failures > self.max_fail_ratio * num_requests:
            missed.append(f"{num_failures} of {num_requests} requests failed")
        for (name, kind), entry in entries.items():
            if kind == "TTFT" and self.max_ttft_p95_ms:
                waited = entry.get_response_time_percentile(0.95)
                if waited > self.max_ttft_p95_ms:
                    missed.append(
                        f"TTFT p95 of {name} is {waited:.0f} ms, {self.max_ttft_p95_ms:.0f} at most"
                    )
        cached = [entry for (_, kind), entry in entries.items() if kind == "CACHED"]
        num_cached = sum(entry.num_requests for entry in cached)
        if self.min_cached_share and num_cached:
            share = sum(entry.avg_response_time * entry.num_requests for entry in cached) / num_cached / 100
            if share < self.min_cached_share:
                missed.append(f"{share:.1%} of later turns was cached, {self.min_cached_share:.1%} must be")
        return missed
