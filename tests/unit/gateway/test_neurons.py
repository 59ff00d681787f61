"""The daily free neurons: counting, covering, refusing, the end of a day, the ledger's word."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping

import pytest

from billing.periods import MICROS_PER_DAY, MICROS_PER_SECOND
from billing.store import StoreError
from gateway.errors import Reason, Refusal
from gateway.limits import Demand
from gateway.neurons import DailyNeurons, NeuronRefresher

DAY = 20_000 * MICROS_PER_DAY
NOON = DAY + MICROS_PER_DAY // 2
E4 = 10_000


def neurons(allocation: int = 10, *, stops: bool = True) -> DailyNeurons:
    return DailyNeurons(lambda account_id: allocation, lambda account_id: stops)


def reserve(daily: DailyNeurons, at_us: int = NOON) -> None:
    daily.reserve(Demand("a", "t", "m", at_us, 1000, 1000))


def test_the_allocation_covers_what_is_left_of_it() -> None:
    daily = neurons(10)
    assert daily.draw("a", NOON, 8 * E4) == 8 * E4
    assert daily.draw("a", NOON, 5 * E4) == 2 * E4
    assert daily.draw("a", NOON, 5 * E4) == 0
    assert daily.draw("b", NOON, 5 * E4) == 5 * E4
    assert daily.used_e4("a") == 18 * E4


def test_a_request_is_admitted_while_anything_is_left_and_then_refused_until_midnight() -> None:
    daily = neurons(10_000)
    reserve(daily)
    daily.draw("a", NOON, 10_000 * E4 - 1)
    reserve(daily)
    daily.draw("a", NOON, 1)
    with pytest.raises(Refusal) as refused:
        reserve(daily, DAY + MICROS_PER_DAY - 90 * MICROS_PER_SECOND)
    refusal = refused.value
    assert (refusal.reason, refusal.reason.status, refusal.reason.code) == (Reason.DAILY_NEURONS, 429, 4006)
    assert "used up your daily free allocation of 10,000 neurons" in refusal.message
    assert "2024-10-05T00:00:00Z" in refusal.message
    assert refusal.retry_after_s == 90
    assert ("x-should-retry", "false") in refusal.headers
    reserve(daily, DAY + MICROS_PER_DAY)


def test_accounts_that_pay_are_never_refused() -> None:
    daily = neurons(1, stops=False)
    daily.draw("a", NOON, 100 * E4)
    reserve(daily)
    assert daily.used_e4("a") == 100 * E4


def test_an_account_that_stops_and_has_nothing_free_is_refused_at_once() -> None:
    with pytest.raises(Refusal):
        reserve(neurons(0))


def test_a_request_that_ends_after_midnight_belongs_to_its_own_day() -> None:
    daily = neurons(10)
    assert daily.draw("a", NOON + MICROS_PER_DAY, E4) == E4
    assert daily.draw("a", NOON, 5 * E4) == 0
    assert daily.used_e4("a") == E4


def test_what_was_not_recorded_is_given_back() -> None:
    daily = neurons(10)
    daily.draw("a", NOON, 8 * E4)
    daily.give_back("a", NOON, 8 * E4)
    assert daily.draw("a", NOON, 10 * E4) == 10 * E4
    daily.draw("a", NOON + MICROS_PER_DAY, E4)
    daily.give_back("a", NOON, 5 * E4)
    assert daily.used_e4("a") == E4


def test_the_ledger_only_ever_adds() -> None:
    daily = neurons(10)
    daily.learn(DAY, {"a": 4 * E4, "b": 1})
    daily.draw("a", NOON, E4)
    daily.learn(DAY, {"a": 4 * E4})
    assert daily.used_e4("a") == 5 * E4
    daily.learn(DAY, {"a": 9 * E4})
    assert daily.used_e4("a") == 9 * E4
    daily.learn(DAY - MICROS_PER_DAY, {"a": 99 * E4})
    assert daily.used_e4("a") == 9 * E4


async def test_what_was_used_is_known_before_the_first_request_and_again_later() -> None:
    daily = neurons(10)
    asked: list[int] = []

    def read(day_start_us: int) -> Mapping[str, int]:
        asked.append(day_start_us)
        if len(asked) == 2:
            raise StoreError("away")
        return {"a": len(asked) * E4}

    refresher = NeuronRefresher(daily, read, refresh_s=0.01, clock_us=lambda: NOON)
    await refresher.start()
    assert daily.used_e4("a") >= E4
    async with asyncio.timeout(5):
        while daily.used_e4("a") < 3 * E4:  # noqa: ASYNC110 - what is waited for has no event
            await asyncio.sleep(0.005)
    await refresher.stop()
    assert set(asked) == {DAY}
