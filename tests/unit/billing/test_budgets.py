"""Budgets in the store: windows, what is charged in them, and leases that many gateways share."""

from __future__ import annotations

import random
from typing import Any

import pytest

from billing.accounts import AccountDirectory
from billing.budgets import Budget, BudgetBook, BudgetError, Lease, charged_nanos
from billing.credits import CreditBook
from billing.periods import Period, day_start_us, parse_date
from billing.rates import RateBook
from billing.store import Store
from tests.support.ledger import ACCOUNT, NOON_US, OTHER_ACCOUNT, record, records

DAY_US = 86_400_000_000
MIDNIGHT_US = day_start_us(parse_date("2026-11-30"))
CHARGE = 350_000
"""Of one plain record."""


@pytest.fixture
def book(store: Store) -> BudgetBook:
    return BudgetBook(store, clock=lambda: NOON_US)


def lease(book: BudgetBook, budget: Budget, gateway_id: str = "a", **options: Any) -> Lease:
    given: dict[str, Any] = {"used_nanos": 0, "pending": {}, "expires_after_us": 60_000_000, **options}
    return book.lease(budget, budget.window(NOON_US), gateway_id, **given)


class TestSet:
    def test_again_changes_the_one_there_is(self, book: BudgetBook) -> None:
        first = book.set_budget(ACCOUNT, "daily", 5)
        again = book.set_budget(ACCOUNT, "daily", 7, action="warn")
        assert (again.id, again.limit_nanos, again.action) == (first.id, 7, "warn")
        assert book.list_budgets() == [again]

    def test_periods_and_tokens_have_budgets_of_their_own(self, store: Store, book: BudgetBook) -> None:
        token, _ = AccountDirectory(store).issue_token(ACCOUNT, "laptop")
        book.set_budget(ACCOUNT, "daily", 5)
        book.set_budget(ACCOUNT, "monthly", 50)
        book.set_budget(ACCOUNT, "daily", 1, token_id=token.id)
        book.set_budget(OTHER_ACCOUNT, "daily", 9)
        assert len(book.list_budgets(ACCOUNT)) == 3
        assert len(book.list_budgets()) == 4

    def test_what_makes_no_sense_is_refused(self, store: Store, book: BudgetBook) -> None:
        token, _ = AccountDirectory(store).issue_token(OTHER_ACCOUNT, "theirs")
        with pytest.raises(BudgetError, match="there is no account"):
            book.set_budget("0" * 32, "daily", 5)
        with pytest.raises(BudgetError, match="has no API token with id"):
            book.set_budget(ACCOUNT, "daily", 5, token_id=token.id)
        with pytest.raises(BudgetError, match="limit is not between"):
            book.set_budget(ACCOUNT, "daily", -1)
        with pytest.raises(BudgetError, match="belongs to a whole account"):
            book.set_budget(ACCOUNT, "credit", 0, token_id=token.id)
        with pytest.raises(BudgetError, match="there is no budget with id"):
            book.remove("nothing")

    def test_removed_is_gone_with_its_leases(self, book: BudgetBook) -> None:
        budget = book.set_budget(ACCOUNT, "daily", 5)
        lease(book, budget)
        book.remove(budget.id)
        assert book.list_budgets() == []
        assert book.set_budget(ACCOUNT, "daily", 5).id != budget.id


class TestWindow:
    """BR-32: windows are half-open and UTC; midnight belongs to the new day."""

    def test_of_a_day(self, book: BudgetBook) -> None:
        budget = book.set_budget(ACCOUNT, "daily", 5)
        assert budget.window(MIDNIGHT_US - 1).end_us == MIDNIGHT_US
        assert budget.window(MIDNIGHT_US) == Period(MIDNIGHT_US, MIDNIGHT_US + DAY_US)

    def test_of_a_month(self, book: BudgetBook) -> None:
        budget = book.set_budget(ACCOUNT, "monthly", 5)
        december = day_start_us(parse_date("2026-12-01"))
        assert budget.window(december - 1) == Period(day_start_us(parse_date("2026-11-01")), december)
        assert budget.window(december).start_us == december

    def test_of_a_total(self, book: BudgetBook) -> None:
        assert book.set_budget(ACCOUNT, "total", 5).window(NOON_US + DAY_US) == Period(NOON_US, None)
        assert book.set_budget(OTHER_ACCOUNT, "total", 5, since_us=1).window(NOON_US) == Period(1, None)


class TestCharged:
    def test_equals_a_plain_sum_whatever_the_window(self, store: Store, rate_book: RateBook) -> None:
        given = records(400, seed=5)
        store.post(given, rate_book)
        draw = random.Random(1)
        for _ in range(40):
            start = MIDNIGHT_US + draw.randrange(-3 * DAY_US, 3 * DAY_US)
            end = draw.choice([None, (start // DAY_US + draw.randrange(1, 4)) * DAY_US])
            expected = sum(
                rate_book.price(one).amount_nanos
                for one in given
                if one.started_at_us >= start and (end is None or one.started_at_us < end)
            )
            with store.reading() as connection:
                assert charged_nanos(connection, ACCOUNT, "", Period(start, end)) == expected

    def test_of_one_token(self, store: Store, rate_book: RateBook, book: BudgetBook) -> None:
        store.post([record(1), record(2, token_id="token-2"), record(3, account_id=OTHER_ACCOUNT)], rate_book)
        with store.reading() as connection:
            window = Period(MIDNIGHT_US, None)
            assert charged_nanos(connection, ACCOUNT, "token-2", window) == CHARGE
            assert charged_nanos(connection, ACCOUNT, "", window) == 2 * CHARGE

    def test_states_say_what_is_left(self, store: Store, rate_book: RateBook, book: BudgetBook) -> None:
        store.post([record(1), record(2, started_at_us=MIDNIGHT_US - 1)], rate_book)
        book.set_budget(ACCOUNT, "daily", 2 * CHARGE)
        book.set_budget(ACCOUNT, "monthly", 2 * CHARGE)
        CreditBook(store, clock=lambda: NOON_US).top_up(ACCOUNT, CHARGE, "Card")
        book.set_budget(ACCOUNT, "credit", 0)
        left = {state.budget.period: state.left_nanos for state in book.states()}
        assert left == {"daily": CHARGE, "monthly": 0, "credit": -CHARGE}


class TestLease:
    def test_alone_a_gateway_holds_all_that_is_left(
        self, store: Store, rate_book: RateBook, book: BudgetBook
    ) -> None:
        budget = book.set_budget(ACCOUNT, "daily", 10 * CHARGE)
        store.post([record()], rate_book)
        got = lease(book, budget, used_nanos=CHARGE, pending={"not-yet": CHARGE, "request-000000": CHARGE})
        assert got.posted == {"request-000000"}
        assert got.charged_nanos == CHARGE
        assert got.held_nanos == 9 * CHARGE

    def test_never_less_than_what_it_has_committed(self, book: BudgetBook) -> None:
        budget = book.set_budget(ACCOUNT, "daily", 100)
        assert lease(book, budget, used_nanos=150).held_nanos == 150
        assert lease(book, budget, "b").held_nanos == 0

    def test_others_get_of_what_is_left_and_a_stopped_one_gives_all_back(self, book: BudgetBook) -> None:
        budget = book.set_budget(ACCOUNT, "daily", 1_000)
        assert lease(book, budget, "a").held_nanos == 1_000
        assert lease(book, budget, "b").held_nanos == 0
        assert lease(book, budget, "a", used_nanos=100).held_nanos == 100 + 900 // 4
        assert lease(book, budget, "b").held_nanos == (1_000 - 325) // 4
        book.release("a")
        assert lease(book, budget, "b").held_nanos == 1_000

    def test_one_that_is_gone_keeps_its_part_until_the_lease_runs_out(self, store: Store) -> None:
        now_us = NOON_US
        book = BudgetBook(store, clock=lambda: now_us)
        budget = book.set_budget(ACCOUNT, "daily", 1_000)
        lease(book, budget, "gone", used_nanos=600)
        assert lease(book, budget, "b").held_nanos == 0
        now_us += 60_000_000
        assert lease(book, budget, "b").held_nanos == 1_000

    def test_a_budget_that_was_removed_leases_nothing_to_the_next(self, book: BudgetBook) -> None:
        budget = book.set_budget(ACCOUNT, "daily", 1_000)
        book.remove(budget.id)
        lease(book, budget)
        assert book.states() == []

    @pytest.mark.parametrize("seed", range(5))
    def test_however_many_gateways_never_spend_more_than_the_limit(
        self, store: Store, rate_book: RateBook, book: BudgetBook, seed: int
    ) -> None:
        """Gateways reserve within what they hold, settle, post late and in any order, and renew at random."""
        draw = random.Random(seed)
        limit = 40 * CHARGE
        budget = book.set_budget(ACCOUNT, "daily", limit)
        gateways = [_Gateway(book, budget, name, draw, seed) for name in "abcd"]
        for gateway in gateways:
            gateway.renew()
        for _ in range(600):
            gateway = draw.choice(gateways)
            draw.choice([gateway.admit, gateway.admit, gateway.end, gateway.renew])()
            if draw.random() < 0.1:
                store.post(gateway.take_unposted(), rate_book)
            assert sum(each.committed for each in gateways) <= limit
        assert sum(each.num_settled for each in gateways) >= 30  # and most of it could be spent


class _Gateway:
    """A gateway as far as one budget is concerned; each request costs the same, as was reserved."""

    def __init__(self, book: BudgetBook, budget: Budget, name: str, draw: random.Random, seed: int) -> None:
        self._book = book
        self._budget = budget
        self._name = name
        self._draw = draw
        self._seed = seed
        self._held = 0
        self._num_running = 0
        self._pending: dict[str, int] = {}
        self._unposted: list[Any] = []
        self.num_settled = 0

    @property
    def committed(self) -> int:
        return (self._num_running + self.num_settled) * CHARGE

    def admit(self) -> None:
        used = self._num_running * CHARGE + sum(self._pending.values())
        if used + CHARGE <= self._held:
            self._num_running += 1

    def end(self) -> None:
        if self._num_running:
            self._num_running -= 1
            request_id = f"{self._seed}-{self._name}-{self.num_settled}"
            self._pending[request_id] = CHARGE
            self._unposted.append(record(request_id=request_id))
            self.num_settled += 1

    def take_unposted(self) -> list[Any]:
        taken, self._unposted = self._unposted, []
        return taken

    def renew(self) -> None:
        got = lease(
            self._book, self._budget, self._name, used_nanos=self._num_running * CHARGE, pending=self._pending
        )
        self._held = got.held_nanos
        for request_id in got.posted:
            del self._pending[request_id]
