"""Requests per minute and at a time."""

from __future__ import annotations

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from gateway.config import LimitsConfig, RateLimits
from gateway.errors import Reason, Refusal
from gateway.limits import AccountLimits, RateBuckets

SECOND = 1_000_000_000


class Clock:
    def __init__(self) -> None:
        self.now_ns = 5 * SECOND

    def __call__(self) -> int:
        return self.now_ns


def limits(clock: Clock, **rates: int) -> AccountLimits:
    return AccountLimits(LimitsConfig(default=RateLimits(**rates)), clock)


def refusal_of(account_limits: AccountLimits, account: str = "a", model: str = "m") -> Refusal | None:
    try:
        account_limits.reserve(account, model).settle()
    except Refusal as refusal:
        return refusal
    return None


def test_traffic_at_exactly_the_limit_is_never_refused() -> None:
    """BR-92: nothing of an earlier window is held against a later one."""
    clock = Clock()
    account_limits = limits(clock, requests_per_minute=6, burst_requests=1)
    for _ in range(500):
        assert refusal_of(account_limits) is None
        clock.now_ns += 10 * SECOND


def test_a_burst_passes_and_then_the_rate_holds() -> None:
    clock = Clock()
    account_limits = limits(clock, requests_per_minute=60, burst_requests=5)
    assert [refusal_of(account_limits) is None for _ in range(6)] == [True] * 5 + [False]
    clock.now_ns += SECOND
    assert [refusal_of(account_limits) is None for _ in range(2)] == [True, False]


def test_the_burst_is_a_minutes_worth_when_nothing_is_said() -> None:
    account_limits = limits(Clock(), requests_per_minute=300)
    assert sum(refusal_of(account_limits) is None for _ in range(400)) == 300


@given(
    rate=st.integers(1, 1000),
    burst=st.integers(1, 50),
    gaps=st.lists(st.integers(0, 20 * SECOND), max_size=60),
)
def test_retry_after_is_the_true_time(rate: int, burst: int, gaps: list[int]) -> None:
    """BR-90: whole seconds, at least one; after them it works, and a second less is not enough."""
    clock = Clock()
    account_limits = limits(clock, requests_per_minute=rate, burst_requests=burst)
    for gap in gaps:
        clock.now_ns += gap
        refusal = refusal_of(account_limits)
        if refusal is None:
            continue
        wait_s = refusal.retry_after_s
        assert refusal.reason is Reason.RATE
        assert wait_s is not None
        assert wait_s >= 1
        clock.now_ns += (wait_s - 1) * SECOND
        if wait_s > 1:
            assert refusal_of(account_limits) is not None
        clock.now_ns += SECOND
        assert refusal_of(account_limits) is None


@given(
    rate=st.integers(1, 600),
    burst=st.integers(1, 30),
    gaps=st.lists(st.integers(0, 5 * SECOND), min_size=1, max_size=80),
)
def test_no_window_ever_holds_more_than_the_bucket_allows(rate: int, burst: int, gaps: list[int]) -> None:
    clock = Clock()
    account_limits = limits(clock, requests_per_minute=rate, burst_requests=burst)
    admitted: list[int] = []
    for gap in gaps:
        clock.now_ns += gap
        if refusal_of(account_limits) is None:
            admitted.append(clock.now_ns)
    interval_ns = 60 * SECOND // rate
    for first, start_ns in enumerate(admitted):
        for last in range(first, len(admitted)):
            assert last - first + 1 <= burst + (admitted[last] - start_ns) // interval_ns + 1


def test_accounts_and_models_have_buckets_of_their_own() -> None:
    account_limits = limits(Clock(), requests_per_minute=1)
    assert refusal_of(account_limits, "a", "m") is None
    assert refusal_of(account_limits, "a", "n") is None
    assert refusal_of(account_limits, "b", "m") is None
    assert refusal_of(account_limits, "a", "m") is not None


def test_single_accounts_can_have_limits_of_their_own() -> None:
    config = LimitsConfig(
        default=RateLimits(requests_per_minute=1), accounts={"big": RateLimits(requests_per_minute=3)}
    )
    account_limits = AccountLimits(config, Clock())
    assert [refusal_of(account_limits, "big") is None for _ in range(4)] == [True, True, True, False]
    assert [refusal_of(account_limits, "small") is None for _ in range(2)] == [True, False]


def test_a_released_request_counts_against_nothing() -> None:
    account_limits = limits(Clock(), requests_per_minute=1, max_concurrent_requests=1)
    for _ in range(3):
        account_limits.reserve("a", "m").release()
    account_limits.reserve("a", "m").settle()
    assert refusal_of(account_limits) is not None


def test_a_settled_request_frees_its_place_and_keeps_its_count() -> None:
    account_limits = limits(Clock(), requests_per_minute=2, max_concurrent_requests=1)
    first = account_limits.reserve("a", "m")
    refusal = refusal_of(account_limits)
    assert refusal is not None
    assert (refusal.reason, refusal.retry_after_s) == (Reason.CAPACITY, 1)
    first.settle()
    assert account_limits.num_running("a") == 0
    assert refusal_of(account_limits) is None, "a request refused for its concurrency took nothing"
    assert refusal_of(account_limits) is not None


def test_a_reservation_ends_once() -> None:
    account_limits = limits(Clock(), requests_per_minute=5, max_concurrent_requests=2)
    first, _second = account_limits.reserve("a", "m"), account_limits.reserve("a", "m")
    first.settle()
    first.settle()
    first.release()
    assert account_limits.num_running("a") == 1


def test_refusals_say_what_is_left() -> None:
    account_limits = limits(Clock(), requests_per_minute=30, burst_requests=1)
    assert refusal_of(account_limits) is None
    refusal = refusal_of(account_limits)
    assert refusal is not None
    assert dict(refusal.headers) == {
        "x-ratelimit-limit-requests": "30",
        "x-ratelimit-remaining-requests": "0",
        "x-ratelimit-reset-requests": "2s",
    }


def test_buckets_are_bounded_and_full_ones_are_forgotten_first() -> None:
    buckets, rates = RateBuckets(max_tracked=3), RateLimits(requests_per_minute=60, burst_requests=1)
    for index in range(3):
        assert buckets.take(("a", str(index)), rates, index * SECOND) == 0
    assert buckets.take(("a", "3"), rates, 3 * SECOND) == 0
    assert buckets.take(("a", "3"), rates, 3 * SECOND) > 0
    for index in range(10):
        buckets.take(("b", str(index)), rates, 3 * SECOND)
        assert len(buckets._full_at_ns) <= 3


@pytest.mark.parametrize("rates", [{"requests_per_minute": 0}, {"burst_requests": 0}])
def test_limits_of_nothing_are_refused_in_the_configuration(rates: dict[str, int]) -> None:
    with pytest.raises(msgspec.ValidationError, match=next(iter(rates))):
        msgspec.convert(rates, RateLimits)
