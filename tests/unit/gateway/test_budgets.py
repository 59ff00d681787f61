"""Budgets in memory: estimates, windows, and what a renewal learns while requests come and go."""

from __future__ import annotations

from typing import Any

import pytest

from billing.budgets import Budget, Lease
from billing.periods import MICROS_PER_DAY
from billing.usage import UsageRecord
from gateway.budgets import Budgets
from gateway.errors import Reason, Refusal
from gateway.limits import Demand
from tests.support.ledger import ACCOUNT, KIMI, NOON_US, OTHER_ACCOUNT, book, record

MIDNIGHT_US = (NOON_US // MICROS_PER_DAY + 1) * MICROS_PER_DAY


def budget_of(limit_nanos: int, **changes: Any) -> Budget:
    fields: dict[str, Any] = {
        "id": "b", "account_id": ACCOUNT, "token_id": "", "period": "daily", "action": "hard",
        "limit_nanos": limit_nanos, "since_us": 0, "created_at_us": 0,
    }  # fmt: skip
    return Budget(**(fields | changes))


def lease_of(held_nanos: int, **changes: Any) -> Lease:
    fields: dict[str, Any] = {
        "limit_nanos": held_nanos, "charged_nanos": 0, "held_nanos": held_nanos, "others_nanos": 0,
        "num_others": 0, "posted": frozenset(),
    }  # fmt: skip
    return Lease(**(fields | changes))


def demand(num_prompt: int = 1_000, num_completion: int = 100, **changes: Any) -> Demand:
    fields: dict[str, Any] = {
        "account_id": ACCOUNT, "token_id": "token-1", "model": KIMI, "started_at_us": NOON_US,
        "max_prompt_tokens": num_prompt, "max_completion_tokens": num_completion,
    }  # fmt: skip
    return Demand(**(fields | changes))


ESTIMATE = 1_000 * 600 + 100 * 3_000


def budgets_of(*given: tuple[Budget, Lease]) -> Budgets:
    budgets = Budgets(book())
    budgets.replace([budget for budget, _ in given], NOON_US)
    for one, (_, lease) in zip(budgets.tracked, given, strict=True):
        one.has_lease = True
        one.window.learn(lease)
    return budgets


def settle(budgets: Budgets, asked: Demand, **changes: Any) -> UsageRecord:
    hold = budgets.reserve(asked)
    assert hold is not None
    made = record(**changes)
    hold.settle(made, book().price(made))
    hold.release()
    return made


def test_what_is_reserved_is_settled_exactly() -> None:
    budgets = budgets_of((budget_of(0), lease_of(ESTIMATE)))
    settle(budgets, demand())
    (one,) = budgets.tracked
    assert (one.window.reserved_nanos, one.window.pending_nanos) == (0, 350_000)
    hold = budgets.reserve(demand(num_prompt=500, num_completion=50))
    assert hold is not None
    with pytest.raises(Refusal):
        budgets.reserve(demand(num_prompt=500, num_completion=50))
    hold.release()
    assert one.window.used_nanos == 350_000


def test_a_settlement_that_comes_after_the_release_counts_once() -> None:
    budgets = budgets_of((budget_of(0), lease_of(10 * ESTIMATE)))
    hold = budgets.reserve(demand())
    assert hold is not None
    hold.release()
    hold.settle(record(), book().price(record()))
    assert budgets.tracked[0].window.used_nanos == 350_000


def test_the_prompt_is_expected_to_be_cached_as_before() -> None:
    budgets = budgets_of((budget_of(0), lease_of(10**12)))
    assert budgets.estimate_nanos(demand()) == ESTIMATE
    for number in range(60):
        settle(budgets, demand(), request_id=f"r{number}")  # 800 of 1,000 tokens are cached
    cheaper = 200 * 600 + 800 * 100 + 100 * 3_000
    assert cheaper <= budgets.estimate_nanos(demand()) <= cheaper * 1.02
    other = demand(account_id=OTHER_ACCOUNT)
    assert budgets.estimate_nanos(other) == ESTIMATE


def test_a_model_without_a_price_is_reserved_nothing_for() -> None:
    assert budgets_of((budget_of(0), lease_of(1))).estimate_nanos(demand(model="unknown")) == 0


def test_at_midnight_a_new_day_begins_and_the_old_one_is_settled_in_the_old() -> None:
    budgets = budgets_of((budget_of(ESTIMATE), lease_of(ESTIMATE)))
    late = budgets.reserve(demand(started_at_us=MIDNIGHT_US - 1))
    assert late is not None
    with pytest.raises(Refusal, match="is reserved by requests that are running"):
        budgets.reserve(demand(started_at_us=MIDNIGHT_US - 1))
    assert budgets.reserve(demand(started_at_us=MIDNIGHT_US)) is not None
    late.settle(record(), book().price(record()))
    assert budgets.tracked[0].window.used_nanos == ESTIMATE


def test_a_refusal_says_when_to_come_again() -> None:
    budgets = budgets_of((budget_of(100), lease_of(0, limit_nanos=100)))
    with pytest.raises(Refusal, match=r"it is renewed at 2026-12-01T00:00:00Z") as refused:
        budgets.reserve(demand())
    assert refused.value.reason is Reason.BUDGET
    assert refused.value.retry_after_s == 12 * 3_600
    total = budgets_of((budget_of(100, period="total"), lease_of(0, limit_nanos=100)))
    with pytest.raises(Refusal, match="it is not renewed by itself") as refused:
        total.reserve(demand())
    assert refused.value.retry_after_s is None


def test_what_other_gateways_hold_is_worth_a_second_try() -> None:
    asked: list[bool] = []
    budgets = Budgets(book(), lambda: asked.append(True))
    budgets.replace([budget_of(10 * ESTIMATE)], NOON_US)
    budgets.tracked[0].has_lease = True
    budgets.tracked[0].window.learn(
        lease_of(0, limit_nanos=10 * ESTIMATE, others_nanos=10 * ESTIMATE, num_others=1)
    )
    with pytest.raises(Refusal, match="is being shared out") as refused:
        budgets.reserve(demand())
    assert refused.value.reason is Reason.CAPACITY
    assert asked == [True]


def test_while_budgets_are_unknown_nobody_is_let_in() -> None:
    budgets = Budgets(book())
    with pytest.raises(Refusal) as refused:
        budgets.reserve(demand())
    assert refused.value.reason is Reason.UNAVAILABLE
    budgets.replace([], NOON_US)
    assert budgets.reserve(demand()) is None


def test_all_budgets_that_cover_a_request_must_have_room() -> None:
    budgets = budgets_of(
        (budget_of(0, id="wide"), lease_of(10 * ESTIMATE)),
        (budget_of(0, id="token", token_id="token-2"), lease_of(ESTIMATE)),
    )
    assert budgets.reserve(demand(token_id="token-2")) is not None
    with pytest.raises(Refusal, match="of the API token"):
        budgets.reserve(demand(token_id="token-2"))
    assert budgets.reserve(demand(token_id="token-1")) is not None
    assert budgets.tracked[0].window.reserved_nanos == 2 * ESTIMATE


def test_what_an_earlier_process_left_in_the_journal_counts_until_it_is_posted() -> None:
    budgets = budgets_of((budget_of(0), lease_of(10**9)))
    budgets.recall([record(), record(1, started_at_us=NOON_US - MICROS_PER_DAY)])
    window = budgets.tracked[0].window
    assert window.pending == {"request-000000": 350_000}
    window.learn(lease_of(10**9, charged_nanos=350_000, posted=frozenset({"request-000000"})))
    assert window.used_nanos == 0


def test_a_smaller_limit_holds_before_anything_more_is_let_in() -> None:
    budgets = budgets_of((budget_of(10 * ESTIMATE), lease_of(10 * ESTIMATE)))
    budgets.replace([budget_of(ESTIMATE)], NOON_US)
    assert not budgets.tracked[0].has_lease
