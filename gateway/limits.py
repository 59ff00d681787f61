"""How much an account may ask for: requests per minute and concurrent requests, held by reservations.

``reserve`` -> ``settle`` (the work was done) or ``release`` (it was not: the request counts against nothing).

Rates are kept by the generic cell rate algorithm, the exact form of a token bucket: all that is stored per
(account, model) is the instant at which its bucket would be full again, in integer nanoseconds. So traffic at
exactly the limit is never refused, and the time to wait is known exactly.
"""

from __future__ import annotations

from collections.abc import Callable

from gateway.config import LimitsConfig, RateLimits
from gateway.errors import Reason, Refusal

_MINUTE_NS = 60_000_000_000
_SECOND_NS = 1_000_000_000

_BucketKey = tuple[str, str]


class RateBuckets:
    """Token buckets by (account, model)."""

    def __init__(self, max_tracked: int) -> None:
        self._full_at_ns: dict[_BucketKey, int] = {}
        self._max_tracked = max_tracked

    def take(self, key: _BucketKey, limits: RateLimits, now_ns: int) -> int:
        """Take one request out of the bucket. Returns 0, or the nanoseconds until there will be one to
        take.
        """
        interval_ns = _interval_ns(limits)
        full_at_ns = max(self._full_at_ns.get(key, 0), now_ns)
        wait_ns = full_at_ns + interval_ns - _burst(limits) * interval_ns - now_ns
        if wait_ns > 0:
            return wait_ns
        if key not in self._full_at_ns and len(self._full_at_ns) >= self._max_tracked:
            self._forget_full(now_ns)
        self._full_at_ns[key] = full_at_ns + interval_ns
        return 0

    def put_back(self, key: _BucketKey, limits: RateLimits) -> None:
        """Undo one :meth:`take`."""
        if key in self._full_at_ns:
            self._full_at_ns[key] -= _interval_ns(limits)

    def num_left(self, key: _BucketKey, limits: RateLimits, now_ns: int) -> int:
        """Requests that could be taken right now."""
        interval_ns = _interval_ns(limits)
        missing_ns = max(self._full_at_ns.get(key, 0) - now_ns, 0)
        return _burst(limits) - -(-missing_ns // interval_ns)

    def _forget_full(self, now_ns: int) -> None:
        """Drop buckets that are full, which is what an unknown bucket is; if there is none, the oldest."""
        self._full_at_ns = {key: full for key, full in self._full_at_ns.items() if full > now_ns}
        while len(self._full_at_ns) >= self._max_tracked:
            del self._full_at_ns[next(iter(self._full_at_ns))]


class Reservation:
    """One admitted request. End it exactly once, by ``settle`` or ``release``; further calls do nothing."""

    __slots__ = ("_is_open", "_key", "_limits", "_owner")

    def __init__(self, owner: AccountLimits, key: _BucketKey, limits: RateLimits) -> None:
        self._owner = owner
        self._key = key
        self._limits = limits
        self._is_open = True

    def settle(self) -> None:
        """The request was served, in whole or in part: free its place, keep its count."""
        if self._is_open:
            self._is_open = False
            self._owner.leave(self._key[0])

    def release(self) -> None:
        """The request was not served: as if it had never come."""
        if self._is_open:
            self._is_open = False
            self._owner.leave(self._key[0])
            self._owner.buckets.put_back(self._key, self._limits)


class AccountLimits:
    """The limits of all accounts. ``clock_ns`` is monotonic."""

    def __init__(self, config: LimitsConfig, clock_ns: Callable[[], int]) -> None:
        self._config = config
        self._clock_ns = clock_ns
        self._num_running: dict[str, int] = {}
        self.buckets = RateBuckets(config.max_tracked_buckets)

    def reserve(self, account_id: str, model: str) -> Reservation:
        """Admit one request.

        Raises:
            Refusal: 429 with ``Retry-After``, code 3040 for too many at once and 3021 for too many a minute.
        """
        limits = self._config.accounts.get(account_id, self._config.default)
        num_running = self._num_running.get(account_id, 0)
        if num_running >= limits.max_concurrent_requests:
            raise Refusal(
                Reason.CAPACITY,
                f"Capacity temporarily exceeded: at most {limits.max_concurrent_requests} requests of an "
                "account at a time, please try again.",
                retry_after_s=1,
            )
        key = (account_id, model)
        now_ns = self._clock_ns()
        wait_ns = self.buckets.take(key, limits, now_ns)
        if wait_ns:
            raise self._rate_refusal(key, limits, now_ns, wait_ns)
        self._num_running[account_id] = num_running + 1
        return Reservation(self, key, limits)

    def leave(self, account_id: str) -> None:
        """One request of the account ended."""
        num_running = self._num_running[account_id] - 1
        if num_running:
            self._num_running[account_id] = num_running
        else:
            del self._num_running[account_id]

    def num_running(self, account_id: str) -> int:
        return self._num_running.get(account_id, 0)

    def _rate_refusal(self, key: _BucketKey, limits: RateLimits, now_ns: int, wait_ns: int) -> Refusal:
        wait_s = -(-wait_ns // _SECOND_NS)
        return Refusal(
            Reason.RATE,
            "rate limiting: inference request per min rate reached",
            retry_after_s=wait_s,
            headers=(
                ("x-ratelimit-limit-requests", str(limits.requests_per_minute)),
                ("x-ratelimit-remaining-requests", str(self.buckets.num_left(key, limits, now_ns))),
                ("x-ratelimit-reset-requests", f"{wait_s}s"),
            ),
        )


def _interval_ns(limits: RateLimits) -> int:
    return _MINUTE_NS // limits.requests_per_minute


def _burst(limits: RateLimits) -> int:
    return limits.requests_per_minute if limits.burst_requests is None else limits.burst_requests
