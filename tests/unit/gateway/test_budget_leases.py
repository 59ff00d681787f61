"""Several gateways on one store: what they let in together stays within the budget."""

from __future__ import annotations

import asyncio
import random
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from billing.budgets import BudgetBook
from billing.rates import RateBook
from billing.store import Store, StoreAwayError
from billing.usage import UsageRecord
from gateway.budget_leases import BudgetLeases
from gateway.budgets import BudgetHold, Budgets
from gateway.config import BudgetsConfig
from gateway.errors import Reason, Refusal
from gateway.limits import Demand
from tests.support.ledger import ACCOUNT, KIMI, NOON_US, book, open_store, record

ESTIMATE = 1_000 * 600 + 100 * 3_000
ASKED = Demand(ACCOUNT, "token-1", KIMI, NOON_US, 1_000, 100)


@pytest.fixture
def store(tmp_path: Path) -> Iterator[Store]:
    with open_store(tmp_path) as opened:
        yield opened


class Gateway:
    """The part of a gateway that keeps budgets; what it settles is posted when it is told to."""

    def __init__(
        self,
        store: Store,
        name: str,
        config: BudgetsConfig | None = None,
        is_all_posted: Callable[[], bool] = lambda: False,
    ) -> None:
        self.name = name
        self.rate_book: RateBook = book()
        self.budgets = Budgets(self.rate_book, lambda: self.leases.want())
        self.leases = BudgetLeases(
            self.budgets,
            BudgetBook(store, clock=lambda: NOON_US),
            name,
            config or BudgetsConfig(refresh_s=0.01),
            clock_us=lambda: NOON_US,
            is_all_posted=is_all_posted,
        )
        self.num_admitted = 0
        self.unposted: list[UsageRecord] = []

    def admit(self) -> BudgetHold:
        hold = self.budgets.reserve(ASKED)
        assert hold is not None
        self.num_admitted += 1
        return hold

    def settle(self, hold: BudgetHold) -> None:
        made = record(request_id=f"{self.name}-{self.num_admitted}-{len(self.unposted)}-{id(hold)}",
                      cached_prompt_tokens=0, completion_tokens=100)  # fmt: skip
        hold.settle(made, self.rate_book.price(made))
        hold.release()
        self.unposted.append(made)


async def test_three_gateways_and_hundreds_of_requests_stay_within_one_budget(store: Store) -> None:
    limit = 100 * ESTIMATE
    BudgetBook(store, clock=lambda: NOON_US).set_budget(ACCOUNT, "daily", limit)
    gateways = [Gateway(store, name) for name in "abc"]
    for gateway in gateways:
        await gateway.leases.start()
    draw = random.Random(3)
    reasons: list[Reason] = []

    async def ask() -> None:
        await asyncio.sleep(draw.random() / 2)
        gateway = draw.choice(gateways)
        try:
            hold = gateway.admit()
        except Refusal as refusal:
            reasons.append(refusal.reason)
            return
        assert sum(each.num_admitted for each in gateways) * ESTIMATE <= limit
        await asyncio.sleep(draw.random() / 10)
        gateway.settle(hold)
        if draw.random() < 0.2:
            posted, gateway.unposted = gateway.unposted, []
            await asyncio.to_thread(store.post, posted, gateway.rate_book)

    await asyncio.gather(*(ask() for _ in range(300)))
    for gateway in gateways:
        await gateway.leases.stop()
    assert len(reasons) >= 200
    assert set(reasons) <= {Reason.CAPACITY, Reason.BUDGET}
    assert 50 <= sum(each.num_admitted for each in gateways) <= 100


async def test_a_gateway_that_stops_leaves_the_rest_to_the_others(store: Store) -> None:
    BudgetBook(store, clock=lambda: NOON_US).set_budget(ACCOUNT, "daily", 10 * ESTIMATE)
    first, second = Gateway(store, "a"), Gateway(store, "b")
    await first.leases.start()
    await second.leases.start()
    with pytest.raises(Refusal) as refused:  # all of it is still with the first
        second.admit()
    assert refused.value.reason is Reason.CAPACITY
    await first.leases.stop()
    first.leases.release()
    await second.leases.refresh()
    for _ in range(10):
        second.admit()
    await second.leases.stop()


async def test_a_store_that_is_away_leaves_what_is_held(
    store: Store, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    def is_away(*_: object) -> None:
        raise StoreAwayError("the database is away")

    BudgetBook(store, clock=lambda: NOON_US).set_budget(ACCOUNT, "daily", 2 * ESTIMATE)
    gateway = Gateway(store, "a", BudgetsConfig(refresh_s=60.0))
    await gateway.leases.start()
    monkeypatch.setattr(BudgetBook, "list_budgets", is_away)
    monkeypatch.setattr(BudgetBook, "release", is_away)
    await gateway.leases.refresh()
    gateway.admit()
    gateway.admit()
    with pytest.raises(Refusal):
        gateway.admit()
    await gateway.leases.stop()
    gateway.leases.release()
    assert any("budgets could not be read" in line for line in caplog.messages)
    assert any("could not be given back" in line for line in caplog.messages)


async def test_what_never_reaches_the_ledger_is_forgotten_after_a_while(store: Store) -> None:
    BudgetBook(store, clock=lambda: NOON_US).set_budget(ACCOUNT, "total", 10 * ESTIMATE)
    gateway = Gateway(store, "a", BudgetsConfig(refresh_s=20.0, lease_s=60.0), is_all_posted=lambda: True)
    await gateway.leases.start()
    gateway.settle(gateway.admit())
    window = gateway.budgets.tracked[0].window
    for _ in range(2):
        await gateway.leases.refresh()
        assert window.pending_nanos == ESTIMATE
    await gateway.leases.refresh()
    assert (window.pending_nanos, window.held_nanos) == (0, 10 * ESTIMATE)
    await gateway.leases.stop()
