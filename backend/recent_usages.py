"""The ends of requests, kept for a gateway that lost its memory.

Owner of state: one replica. Invariants: sequence numbers rise by one from 1 and are never reused; at most
``max_entries`` are kept, none longer than ``ttl_s``; the oldest leave first, so what is left is always the
newest run without a gap. Time is UTC epoch seconds.
"""

from __future__ import annotations

import itertools
import time
from collections import deque
from collections.abc import Callable

from backend.wire import FinishReason, RecentUsage, RecentUsages, TokenUsage

MAX_PAGE = 1000


class RecentUsageLog:
    """A ring of :class:`RecentUsage`, read in pages."""

    def __init__(
        self, replica_id: str, *, max_entries: int, ttl_s: float, clock: Callable[[], float] = time.time
    ) -> None:
        self._replica_id = replica_id
        self._ttl_s = ttl_s
        self._clock = clock
        self._started_at = clock()
        self._last_sequence = 0
        self._max_entries = max_entries
        self._entries: deque[RecentUsage] = deque()
        self._by_request: dict[str, RecentUsage] = {}

    @property
    def started_at(self) -> float:
        return self._started_at

    def record(
        self, request_id: str, billing_context: str, usage: TokenUsage, finish_reason: FinishReason
    ) -> RecentUsage:
        """Keep the end of one request; call once per request."""
        self._last_sequence += 1
        entry = RecentUsage(
            sequence=self._last_sequence,
            request_id=request_id,
            billing_context=billing_context,
            usage=usage,
            finish_reason=finish_reason,
            finished_at=self._clock(),
        )
        self._entries.append(entry)
        self._by_request[request_id] = entry
        self._drop_old()
        return entry

    def page(self, after: int) -> RecentUsages:
        """The oldest entries with a sequence above ``after``, at most :data:`MAX_PAGE`.

        ``next_after`` continues where this page ends; a page is the last when it is empty.
        """
        self._drop_old()
        # Sequences are consecutive, so the place of the first wanted entry is known.
        first = self._entries[0].sequence if self._entries else self._last_sequence + 1
        start = max(0, after + 1 - first)
        stop = min(len(self._entries), start + MAX_PAGE)
        usages = list(itertools.islice(self._entries, start, stop))
        return RecentUsages(
            replica_id=self._replica_id,
            started_at=self._started_at,
            usages=usages,
            next_after=usages[-1].sequence if usages else after,
        )

    def page_of(self, request_id: str) -> RecentUsages:
        """The newest end of a request with this id, as a page of at most one."""
        entry = self.find(request_id)
        return RecentUsages(
            replica_id=self._replica_id,
            started_at=self._started_at,
            usages=[] if entry is None else [entry],
            next_after=self._last_sequence if entry is None else entry.sequence,
        )

    def find(self, request_id: str) -> RecentUsage | None:
        """The newest end of a request with this id."""
        return self._by_request.get(request_id)

    def _drop_old(self) -> None:
        oldest = self._clock() - self._ttl_s
        entries = self._entries
        while entries and (len(entries) > self._max_entries or entries[0].finished_at < oldest):
            dropped = entries.popleft()
            if self._by_request[dropped.request_id] is dropped:
                del self._by_request[dropped.request_id]
