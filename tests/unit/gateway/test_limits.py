"""Requests per minute and at a time."""

from __future__ import annotations

from typing import Any

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from billing.rates import NO_CHARGE, Charge
from billing.usage import UsageRecord
from gateway.buckets import BucketSize, RateBuckets
from gateway.config import LimitsConfig, RateLimits
from gateway.errors import Reason, Refusal
from gateway.limits import AccountLimits, Admission, Demand, Hold, Reservation

SECOND = 1_000_000_000


class Clock:
    def __init__(self) -> None:
        self.now_ns = 5 * SECOND

    def __call__(self) -> int:
        return self.now_ns


def limits(clock: Clock, **rates: int) -> AccountLimits:
    return AccountLimits(LimitsConfig(default=RateLimits(**rates)), clock)


def demand(account: str = "a", model: str = "m", prompt: int = 0, completion: int = 0) -> Demand:
    return Demand(account, "t", model, 0, prompt, completion)


def reserve(account_limits: AccountLimits, **fields: Any) -> Reservation:
    return Admission([account_limits]).reserve(demand(**fields))


def refusal_of(
    account_limits: AccountLimits, account: str = "a", model: str = "m", **tokens: int
) -> Refusal | None:
    try:
        reservation = reserve(account_limits, account=account, model=model, **tokens)
    except Refusal as refusal:
        return refusal
    reservation.served()
    reservation.release()
    return None


def record(prompt: int, completion: int) -> UsageRecord:
    return UsageRecord(
        request_id="r",
        account_id="a",
        token_id="t",
        model="m",
        requested_model="m",
        surface="v1",
        started_at_us=0,
        finished_at_us=1,
        prompt_tokens=prompt,
        cached_prompt_tokens=0,
        completion_tokens=completion,
    )


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


def test_embedding_models_have_a_rate_of_their_own() -> None:
    rates = RateLimits(requests_per_minute=1, embedding_requests_per_minute=2)
    account_limits = AccountLimits(LimitsConfig(default=rates), Clock(), ["e"])
    assert [refusal_of(account_limits, "a", "e") is None for _ in range(3)] == [True, True, False]
    assert [refusal_of(account_limits, "a", "m") is None for _ in range(2)] == [True, False]
    assert dict(account_limits.headers("a", "e"))["x-ratelimit-limit-requests"] == "2"


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
        reserve(account_limits).release()
    reserve(account_limits).served()
    assert refusal_of(account_limits) is not None


def test_a_served_request_frees_its_place_and_keeps_its_count() -> None:
    account_limits = limits(Clock(), requests_per_minute=2, max_concurrent_requests=1)
    first = reserve(account_limits)
    refusal = refusal_of(account_limits)
    assert refusal is not None
    assert (refusal.reason, refusal.retry_after_s) == (Reason.CAPACITY, 1)
    first.served()
    assert account_limits.num_running("a") == 0
    assert refusal_of(account_limits) is None, "a request refused for its concurrency took nothing"
    assert refusal_of(account_limits) is not None


def test_a_reservation_ends_once() -> None:
    account_limits = limits(Clock(), requests_per_minute=5, max_concurrent_requests=2)
    first, _second = reserve(account_limits), reserve(account_limits)
    first.served()
    first.served()
    first.release()
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
    buckets, rates = RateBuckets(max_tracked=3), BucketSize.per_minute(60, 1)
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


def test_tokens_are_held_by_an_upper_estimate_and_settled_by_the_true_count() -> None:
    account_limits = limits(Clock(), tokens_per_minute=1000)
    first = reserve(account_limits, prompt=300, completion=400)
    refusal = refusal_of(account_limits, prompt=301, completion=0)
    assert refusal is not None
    assert (refusal.reason, refusal.retry_after_s) == (Reason.RATE, 1)
    assert dict(refusal.headers)["x-ratelimit-remaining-tokens"] == "300"
    first.served()
    first.settle(record(50, 20), NO_CHARGE)
    first.release()
    assert dict(account_limits.headers("a", "m"))["x-ratelimit-remaining-tokens"] == "930"


def test_more_than_was_estimated_is_owed() -> None:
    account_limits = limits(Clock(), tokens_per_minute=600)
    first = reserve(account_limits, prompt=10)
    first.served()
    first.settle(record(700, 200), NO_CHARGE)
    first.release()
    assert dict(account_limits.headers("a", "m"))["x-ratelimit-remaining-tokens"] == "0"
    refusal = refusal_of(account_limits, prompt=1)
    assert refusal is not None
    assert refusal.retry_after_s == 31  # 300 over, 10 a second, and the one that is asked for


def test_a_request_larger_than_the_bucket_waits_for_a_full_one_and_no_longer() -> None:
    clock = Clock()
    account_limits = limits(clock, tokens_per_minute=60)
    assert refusal_of(account_limits, prompt=1) is None
    assert refusal_of(account_limits, prompt=10_000) is not None
    clock.now_ns += 2 * SECOND
    assert refusal_of(account_limits, prompt=10_000) is None


def test_a_request_refused_for_its_tokens_takes_no_request_and_no_place() -> None:
    account_limits = limits(Clock(), requests_per_minute=2, tokens_per_minute=10)
    assert refusal_of(account_limits, prompt=10) is None
    for _ in range(5):
        assert refusal_of(account_limits, prompt=5) is not None
    assert dict(account_limits.headers("a", "m"))["x-ratelimit-remaining-requests"] == "1"
    assert account_limits.num_running("a") == 0


def test_tokens_of_a_request_that_was_not_served_come_back() -> None:
    account_limits = limits(Clock(), tokens_per_minute=100)
    reserve(account_limits, prompt=100).release()
    assert refusal_of(account_limits, prompt=100) is None


class Refuses:
    def reserve(self, demand: Demand) -> Hold | None:
        raise Refusal(Reason.CAPACITY, "no")


class Counts:
    """A limiter that holds something and remembers what happened to it."""

    def __init__(self) -> None:
        self.events: list[str] = []

    def reserve(self, demand: Demand) -> Hold | None:
        self.events.append("reserve")
        return self

    def served(self) -> None:
        self.events.append("served")

    def settle(self, record: UsageRecord, charge: Charge) -> None:
        self.events.append("settle")

    def release(self) -> None:
        self.events.append("release")


def test_what_an_earlier_limiter_holds_is_released_when_a_later_one_refuses() -> None:
    counts = Counts()
    with pytest.raises(Refusal):
        Admission([counts, Refuses()]).reserve(demand())
    assert counts.events == ["reserve", "release"]


def test_every_limiter_sees_a_request_to_its_end() -> None:
    counts = Counts()
    reservation = Admission([counts]).reserve(demand())
    reservation.served()
    reservation.settle(record(1, 1), NO_CHARGE)
    reservation.release()
    reservation.release()
    assert counts.events == ["reserve", "served", "settle", "release"]


@pytest.mark.parametrize(
    ("wait_s", "shown"), [(0, "0ms"), (0.02, "20ms"), (1.5, "1.5s"), (59.0, "59s"), (63.0, "1m3s")]
)
def test_times_are_written_as_clients_of_openai_read_them(wait_s: float, shown: str) -> None:
    clock = Clock()
    account_limits = limits(clock, requests_per_minute=1, burst_requests=2)
    assert refusal_of(account_limits) is None
    assert refusal_of(account_limits) is None
    clock.now_ns += int((120 - wait_s) * SECOND)
    assert dict(account_limits.headers("a", "m"))["x-ratelimit-reset-requests"] == shown
