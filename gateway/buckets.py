"""Token buckets, kept by the generic cell rate algorithm: one instant per bucket.

All that is stored is when a bucket would be full again, in integer nanoseconds. So traffic at exactly the
limit is never refused, the time to wait is known exactly, and a full bucket need not be stored at all.
"""

from __future__ import annotations

import msgspec

MINUTE_NS = 60_000_000_000

BucketKey = tuple[str, str]
"""(account id, model)"""


class BucketSize(msgspec.Struct, frozen=True):
    """``interval_ns`` is how long one unit takes to come back, ``capacity`` how many a full bucket holds."""

    interval_ns: int
    capacity: int

    @classmethod
    def per_minute(cls, num: int, capacity: int | None = None) -> BucketSize:
        """``num`` units a minute; a minute's worth at once unless ``capacity`` says otherwise."""
        return cls(max(MINUTE_NS // num, 1), num if capacity is None else capacity)

    def num_left(self, full_in_ns: int) -> int:
        """Units in a bucket that will be full again in so many nanoseconds."""
        return max(self.capacity - -(-full_in_ns // self.interval_ns), 0)


class RateBuckets:
    """Buckets of one kind by (account, model). At most ``max_tracked`` are remembered."""

    def __init__(self, max_tracked: int) -> None:
        self._full_at_ns: dict[BucketKey, int] = {}
        self._max_tracked = max_tracked

    def take(self, key: BucketKey, size: BucketSize, now_ns: int, num: int = 1) -> int:
        """Take ``num`` units, at most what a full bucket holds. Returns 0, or the nanoseconds until that can
        be had.
        """
        cost_ns = num * size.interval_ns
        full_at_ns = max(self._full_at_ns.get(key, 0), now_ns)
        wait_ns = full_at_ns + cost_ns - size.capacity * size.interval_ns - now_ns
        if wait_ns > 0:
            return wait_ns
        if key not in self._full_at_ns and len(self._full_at_ns) >= self._max_tracked:
            self._forget_full(now_ns)
        self._full_at_ns[key] = full_at_ns + cost_ns
        return 0

    def put_back(self, key: BucketKey, size: BucketSize, num: int = 1) -> None:
        """Undo ``num`` units of a :meth:`take`; a negative number takes more, into debt if need be."""
        if key in self._full_at_ns:
            self._full_at_ns[key] -= num * size.interval_ns

    def num_left(self, key: BucketKey, size: BucketSize, now_ns: int) -> int:
        """Units that could be taken right now."""
        return size.num_left(self.full_in_ns(key, now_ns))

    def full_in_ns(self, key: BucketKey, now_ns: int) -> int:
        """How long until the bucket is full again; 0 when it is."""
        return max(self._full_at_ns.get(key, 0) - now_ns, 0)

    def _forget_full(self, now_ns: int) -> None:
        """Drop buckets that are full, which is what an unknown bucket is; if there is none, the oldest."""
        self._full_at_ns = {key: full for key, full in self._full_at_ns.items() if full > now_ns}
        while len(self._full_at_ns) >= self._max_tracked:
            del self._full_at_ns[next(iter(self._full_at_ns))]
