"""How much an account may ask for: requests and tokens per minute, concurrent requests.

A request's way through its limits: ``reserve`` (an upper estimate is held, or the request is refused) ->
``served`` (the work was done: its place is free, its count stays) -> ``settle`` (the record is made: what was
held becomes what was used) -> ``release`` (the end; what was reserved and never served counts as if it had
never come). All of it is integers in memory: nothing here waits.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence
from typing import Protocol

import msgspec

from billing.rates import Charge
from billing.usage import UsageRecord
from gateway.buckets import BucketKey, BucketSize, RateBuckets
from gateway.config import LimitsConfig, RateLimits
from gateway.errors import Reason, Refusal

_SECOND_NS = 1_000_000_000
_MILLI_NS = 1_000_000

Headers = tuple[tuple[str, str], ...]


class Demand(msgspec.Struct, frozen=True):
    """What a request may come to take, at most."""

    account_id: str
    token_id: str
    model: str
    started_at_us: int
    max_prompt_tokens: int
    max_completion_tokens: int


class Hold(Protocol):
    """What one limiter holds for one request. Every method may be called when others were not."""

    def served(self) -> None:
        """The request was served, in whole or in part, and occupies nothing any more."""

    def settle(self, record: UsageRecord, charge: Charge) -> None:
        """What was held becomes what was used."""

    def release(self) -> None:
        """The request is over. Called exactly once, last."""


class Limiter(Protocol):
    """One kind of limit."""

    def reserve(self, demand: Demand) -> Hold | None:
        """Hold what the request may take; None when there is nothing to hold. Raises Refusal."""


class Reservation:
    """What all limiters hold for one request."""

    __slots__ = ("_holds", "_is_open")

    def __init__(self, holds: Sequence[Hold]) -> None:
        self._holds = holds
        self._is_open = True

    def served(self) -> None:
        for hold in self._holds:
            hold.served()

    def settle(self, record: UsageRecord, charge: Charge) -> None:
        for hold in self._holds:
            hold.settle(record, charge)

    def release(self) -> None:
        """Idempotent."""
        if self._is_open:
            self._is_open = False
            for hold in self._holds:
                hold.release()


class Admission:
    """Asks all limiters in turn; a request is admitted by all of them or costs nothing."""

    def __init__(self, limiters: Sequence[Limiter]) -> None:
        self._limiters = tuple(limiters)

    def reserve(self, demand: Demand) -> Reservation:
        """Raises Refusal: the first limiter's that refuses."""
        holds: list[Hold] = []
        try:
            for limiter in self._limiters:
                hold = limiter.reserve(demand)
                if hold is not None:
                    holds.append(hold)
        except Refusal:
            for hold in holds:
                hold.release()
            raise
        return Reservation(holds)


class AccountHold:
    """A place, one request, and an estimate of tokens."""

    __slots__ = ("_is_running", "_is_served", "_key", "_num_tokens", "_owner", "_sizes")

    def __init__(self, owner: AccountLimits, key: BucketKey, sizes: _Sizes, num_tokens: int) -> None:
        self._owner = owner
        self._key = key
        self._sizes = sizes
        self._num_tokens = num_tokens
        self._is_running = True
        self._is_served = False

    def served(self) -> None:
        self._is_served = True
        self._leave()

    def settle(self, record: UsageRecord, charge: Charge) -> None:
        """Also later than :meth:`release`, for an answer whose counts took long to learn."""
        if self._sizes.tokens is not None:
            num_used = record.prompt_tokens + record.completion_tokens
            self._owner.tokens.put_back(self._key, self._sizes.tokens, self._num_tokens - num_used)
            self._num_tokens = num_used

    def release(self) -> None:
        self._leave()
        if not self._is_served:
            self._owner.requests.put_back(self._key, self._sizes.requests)
            if self._sizes.tokens is not None:
                self._owner.tokens.put_back(self._key, self._sizes.tokens, self._num_tokens)

    def _leave(self) -> None:
        if self._is_running:
            self._is_running = False
            self._owner.leave(self._key[0])


class _Sizes(msgspec.Struct, frozen=True):
    """The buckets of one account; no ``tokens`` bucket when tokens are not limited."""

    limits: RateLimits
    requests: BucketSize
    tokens: BucketSize | None
    requests_header: tuple[str, str]
    tokens_header: tuple[str, str]

    @classmethod
    def of(cls, limits: RateLimits, requests_per_minute: int) -> _Sizes:
        per_minute = limits.tokens_per_minute
        return cls(
            limits,
            BucketSize.per_minute(requests_per_minute, limits.burst_requests),
            None if per_minute is None else BucketSize.per_minute(per_minute),
            ("x-ratelimit-limit-requests", str(requests_per_minute)),
            ("x-ratelimit-limit-tokens", str(per_minute)),
        )


class AccountLimits:
    """The rates and places of all accounts. ``clock_ns`` is monotonic; ``embedding_models`` have a rate of
    their own.
    """

    def __init__(
        self,
        config: LimitsConfig,
        clock_ns: Callable[[], int],
        embedding_models: Collection[str] = (),
    ) -> None:
        self._embedding_models = frozenset(embedding_models)
        self._for_text = _by_account(config, lambda limits: limits.requests_per_minute)
        self._for_embeddings = _by_account(config, lambda limits: limits.embedding_requests_per_minute)
        self._clock_ns = clock_ns
        self._num_running: dict[str, int] = {}
        self.requests = RateBuckets(config.max_tracked_buckets)
        self.tokens = RateBuckets(config.max_tracked_buckets)

    def reserve(self, demand: Demand) -> AccountHold:
        """Admit one request.

        Raises:
            Refusal: 429 with ``Retry-After``, code 3040 for too many at once and 3021 for too many requests
                or tokens a minute.
        """
        account_id = demand.account_id
        sizes = self._sizes_of(account_id, demand.model)
        num_running = self._num_running.get(account_id, 0)
        if num_running >= sizes.limits.max_concurrent_requests:
            raise _too_many_at_once(sizes.limits.max_concurrent_requests)
        key = (account_id, demand.model)
        now_ns = self._clock_ns()
        wait_ns = self.requests.take(key, sizes.requests, now_ns)
        if wait_ns:
            message = "rate limiting: inference request per min rate reached"
            raise self._rate_refusal(key, sizes, now_ns, wait_ns, message)
        num_tokens = 0
        if sizes.tokens is not None:
            # What never fits would wait for ever, so it needs a full bucket and no more.
            num_tokens = demand.max_prompt_tokens + demand.max_completion_tokens
            num_tokens = min(num_tokens, sizes.tokens.capacity)
            wait_ns = self.tokens.take(key, sizes.tokens, now_ns, num_tokens)
            if wait_ns:
                self.requests.put_back(key, sizes.requests)
                message = "rate limiting: inference tokens per min rate reached"
                raise self._rate_refusal(key, sizes, now_ns, wait_ns, message)
        self._num_running[account_id] = num_running + 1
        return AccountHold(self, key, sizes, num_tokens)

    def leave(self, account_id: str) -> None:
        """One request of the account ended."""
        num_running = self._num_running[account_id] - 1
        if num_running:
            self._num_running[account_id] = num_running
        else:
            del self._num_running[account_id]

    def num_running(self, account_id: str) -> int:
        return self._num_running.get(account_id, 0)

    def headers(self, account_id: str, model: str) -> Headers:
        """``x-ratelimit-*`` as they stand now; those of tokens only where tokens are limited.

        ``reset`` is the time until the bucket is full again.
        """
        key = (account_id, model)
        sizes = self._sizes_of(account_id, model)
        now_ns = self._clock_ns()
        size, full_in_ns = sizes.requests, self.requests.full_in_ns(key, now_ns)
        shown = (
            sizes.requests_header,
            ("x-ratelimit-remaining-requests", str(size.num_left(full_in_ns))),
            ("x-ratelimit-reset-requests", _duration(full_in_ns)),
        )
        if sizes.tokens is None:
            return shown
        full_in_ns = self.tokens.full_in_ns(key, now_ns)
        return (
            *shown,
            sizes.tokens_header,
            ("x-ratelimit-remaining-tokens", str(sizes.tokens.num_left(full_in_ns))),
            ("x-ratelimit-reset-tokens", _duration(full_in_ns)),
        )

    def _sizes_of(self, account_id: str, model: str) -> _Sizes:
        default, sizes = self._for_embeddings if model in self._embedding_models else self._for_text
        return sizes.get(account_id, default)

    def _rate_refusal(
        self, key: BucketKey, sizes: _Sizes, now_ns: int, wait_ns: int, message: str
    ) -> Refusal:
        return Refusal(
            Reason.RATE,
            message,
            retry_after_s=-(-wait_ns // _SECOND_NS),
            headers=self.headers(*key),
        )


def _by_account(
    config: LimitsConfig, rate_of: Callable[[RateLimits], int]
) -> tuple[_Sizes, dict[str, _Sizes]]:
    """The buckets of accounts that are not named, and of those that are."""
    named = {account: _Sizes.of(limits, rate_of(limits)) for account, limits in config.accounts.items()}
    return _Sizes.of(config.default, rate_of(config.default)), named


def _duration(wait_ns: int) -> str:
    """As OpenAI writes it: ``20ms``, ``1.5s``, ``1m3s``."""
    wait_ms = -(-wait_ns // _MILLI_NS)
    if wait_ms < 1_000:
        return f"{wait_ms}ms"
    minutes, rest_ms = divmod(wait_ms, 60_000)
    seconds = f"{rest_ms / 1_000:g}s"
    return f"{minutes}m{seconds}" if minutes else seconds


def _too_many_at_once(most: int) -> Refusal:
    return Refusal(
        Reason.CAPACITY,
        f"Capacity temporarily exceeded: at most {most} requests of an account at a time, please try again.",
        retry_after_s=1,
    )
