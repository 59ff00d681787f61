"""Prepaid credit and credit notes: transactions of their own, never edits."""

from __future__ import annotations

from typing import Any

import pytest
from sqlalchemy import insert, select, text
from sqlalchemy.exc import IntegrityError

from billing.audit import audit
from billing.audit_checks import ReplicaUsage
from billing.credits import MAX_CREDIT_NANOS, Credit, CreditBook, CreditError
from billing.periods import month_period
from billing.rates import RateBook
from billing.reports import balance_nanos
from billing.schema import ledger_entries, ledger_transactions
from billing.statement import monthly_statement
from billing.store import Store
from tests.support.ledger import ACCOUNT, KIMI, NOON_US, OTHER_ACCOUNT, drop_guards, record

DOLLAR = 1_000_000_000
DAY_US = 86_400_000_000


@pytest.fixture
def credit_book(store: Store) -> CreditBook:
    return CreditBook(store, clock=lambda: NOON_US)


def entries_of(store: Store, credit: Credit) -> list[tuple[str, int]]:
    with store.reading() as connection:
        rows = connection.execute(
            select(ledger_entries.c.ledger_account, ledger_entries.c.amount_nanos)
            .where(ledger_entries.c.transaction_id == credit.transaction_id)
            .order_by(ledger_entries.c.leg)
        )
        return [(row.ledger_account, row.amount_nanos) for row in rows]


class TestTopUp:
    def test_the_account_owes_less_than_nothing(self, store: Store, credit_book: CreditBook) -> None:
        credit = credit_book.top_up(ACCOUNT, 25 * DOLLAR, "Invoice 17")
        assert entries_of(store, credit) == [
            (f"receivable:{ACCOUNT}", -25 * DOLLAR),
            ("cash", 25 * DOLLAR),
        ]
        assert balance_nanos(store, ACCOUNT) == -25 * DOLLAR
        assert balance_nanos(store, OTHER_ACCOUNT) == 0

    def test_again_under_the_same_reference_changes_nothing(
        self, store: Store, credit_book: CreditBook
    ) -> None:
        first = credit_book.top_up(ACCOUNT, DOLLAR, "Card", reference="pay_1")
        later = CreditBook(store, clock=lambda: NOON_US + 1)
        assert later.top_up(ACCOUNT, DOLLAR, "Card", reference="pay_1") == first
        assert balance_nanos(store, ACCOUNT) == -DOLLAR

    def test_another_amount_under_the_same_reference_is_refused(self, credit_book: CreditBook) -> None:
        credit_book.top_up(ACCOUNT, DOLLAR, "Card", reference="pay_1")
        with pytest.raises(CreditError, match="is booked already, with another amount or reason"):
            credit_book.top_up(ACCOUNT, 2 * DOLLAR, "Card", reference="pay_1")

    def test_a_reference_belongs_to_one_account(self, store: Store, credit_book: CreditBook) -> None:
        for account in (ACCOUNT, OTHER_ACCOUNT):
            credit_book.top_up(account, DOLLAR, "Card", reference="pay_1")
        assert balance_nanos(store, OTHER_ACCOUNT) == -DOLLAR

    @pytest.mark.parametrize(
        ("changes", "problem"),
        [
            ({"amount_nanos": 0}, "the amount 0.00 is not between"),
            ({"amount_nanos": -DOLLAR}, "the amount -1.00 is not between"),
            ({"amount_nanos": MAX_CREDIT_NANOS + 1}, "is not between"),
            ({"reason": ""}, "a reason needs"),
            ({"reason": "two\nlines"}, "a reason needs"),
            ({"reference": "with space"}, "a reference needs"),
            ({"account_id": "0" * 32}, "there is no account"),
        ],
    )
    def test_what_makes_no_sense_is_refused(
        self, store: Store, credit_book: CreditBook, changes: dict[str, Any], problem: str
    ) -> None:
        with pytest.raises(CreditError, match=problem):
            credit_book.top_up(**{"account_id": ACCOUNT, "amount_nanos": DOLLAR, "reason": "Card", **changes})
        assert credit_book.list_credits() == []

    def test_is_append_only(self, store: Store, credit_book: CreditBook) -> None:
        credit_book.top_up(ACCOUNT, DOLLAR, "Card")
        with pytest.raises(IntegrityError, match="append-only"), store.writing() as connection:
            connection.execute(text("UPDATE credits SET amount_nanos = 0"))


class TestNote:
    def test_gives_the_whole_charge_of_a_request_back_and_leaves_the_charge(
        self, store: Store, rate_book: RateBook, credit_book: CreditBook
    ) -> None:
        store.post([record()], rate_book)
        credit = credit_book.note(ACCOUNT, "Wrong answer", request_id="request-000000")
        assert credit.amount_nanos == 350_000
        assert entries_of(store, credit) == [
            (f"receivable:{ACCOUNT}", -350_000),
            (f"revenue:{KIMI}", 350_000),
        ]
        assert balance_nanos(store, ACCOUNT) == 0
        with store.reading() as connection:
            charge = connection.execute(
                select(ledger_transactions).where(ledger_transactions.c.id == "request-000000")
            ).one()
        assert charge.amount_nanos == 350_000

    def test_never_more_than_was_charged(
        self, store: Store, rate_book: RateBook, credit_book: CreditBook
    ) -> None:
        store.post([record()], rate_book)
        credit_book.note(ACCOUNT, "Part", amount_nanos=300_000, request_id="request-000000")
        with pytest.raises(CreditError, match=r"has 0\.00005 left to give back, not 0\.000051"):
            credit_book.note(ACCOUNT, "More", amount_nanos=51_000, request_id="request-000000")
        assert credit_book.note(ACCOUNT, "Rest", request_id="request-000000").amount_nanos == 50_000
        with pytest.raises(CreditError, match="has nothing left to give back"):
            credit_book.note(ACCOUNT, "Again", request_id="request-000000")

    def test_again_under_the_same_reference_changes_nothing(
        self, store: Store, rate_book: RateBook, credit_book: CreditBook
    ) -> None:
        store.post([record()], rate_book)
        notes = [
            credit_book.note(ACCOUNT, "Wrong", request_id="request-000000", reference="case-1")
            for _ in range(2)
        ]
        assert notes[0] == notes[1]
        assert balance_nanos(store, ACCOUNT) == 0

    def test_not_for_a_request_of_another_account(
        self, store: Store, rate_book: RateBook, credit_book: CreditBook
    ) -> None:
        store.post([record()], rate_book)
        with pytest.raises(CreditError, match="has no request 'request-000000'"):
            credit_book.note(OTHER_ACCOUNT, "Mine", request_id="request-000000")

    def test_without_a_request_it_is_an_adjustment(self, store: Store, credit_book: CreditBook) -> None:
        credit = credit_book.note(ACCOUNT, "Goodwill", amount_nanos=DOLLAR)
        assert entries_of(store, credit)[1] == ("adjustments", DOLLAR)

    def test_needs_an_amount_or_a_request(self, credit_book: CreditBook) -> None:
        with pytest.raises(CreditError, match="needs an amount, or the request"):
            credit_book.note(ACCOUNT, "Why")


class TestStatement:
    def test_from_the_opening_to_the_closing_balance(self, store: Store, rate_book: RateBook) -> None:
        october = NOON_US - 60 * DAY_US
        CreditBook(store, clock=lambda: october).top_up(ACCOUNT, DOLLAR, "Card")
        store.post([record(1, started_at_us=october), record(2), record(3)], rate_book)
        CreditBook(store, clock=lambda: NOON_US).note(ACCOUNT, "Wrong", request_id="request-000001")
        CreditBook(store, clock=lambda: NOON_US).top_up(ACCOUNT, 2 * DOLLAR, "Card")
        bill = monthly_statement(store, ACCOUNT, "2026-11")
        assert bill.opening_balance_nanos == DOLLAR - 350_000
        assert bill.amount_nanos == 700_000
        assert (bill.topped_up_nanos, bill.given_back_nanos) == (2 * DOLLAR, 350_000)
        assert bill.closing_balance_nanos == 3 * DOLLAR - 700_000 == -balance_nanos(store, ACCOUNT)
        assert [credit.kind for credit in bill.credits] == ["credit_note", "top_up"]
        december = monthly_statement(store, ACCOUNT, "2026-12")
        assert december.opening_balance_nanos == december.closing_balance_nanos == bill.closing_balance_nanos

    def test_says_what_the_free_allocation_covered(self, store: Store, rate_book: RateBook) -> None:
        whole = rate_book.price(record())
        store.post([record(1), record(2, free_neurons_e4=whole.neurons_e4 // 2)], rate_book)
        bill = monthly_statement(store, ACCOUNT, "2026-11")
        assert bill.free_nanos == 175_000
        assert bill.amount_nanos == 525_000 == sum(line.amount_nanos for line in bill.lines)
        assert [line.amount for line in bill.lines if line.token_class == "free_allocation"] == ["-0.000175"]
        assert bill.discount_nanos == 2 * whole.discount_nanos == sum(x.discount_nanos for x in bill.lines)
        assert audit(store, rate_book).is_clean


def test_credits_of_a_period_are_half_open(store: Store) -> None:
    period = month_period("2026-11")
    assert period.start_us is not None
    assert period.end_us is not None
    for number, at_us in enumerate([period.start_us - 1, period.start_us, period.end_us - 1, period.end_us]):
        CreditBook(store, clock=lambda at=at_us: at).top_up(ACCOUNT, number + 1, "Card")
    assert [credit.amount_nanos for credit in CreditBook(store).list_credits(ACCOUNT, period)] == [2, 3]


class TestAudit:
    def test_credits_are_no_drift(self, store: Store, rate_book: RateBook, credit_book: CreditBook) -> None:
        store.post([record()], rate_book)
        credit_book.top_up(ACCOUNT, DOLLAR, "Card")
        credit_book.note(ACCOUNT, "Wrong", request_id="request-000000")
        credit_book.note(ACCOUNT, "Goodwill", amount_nanos=DOLLAR)
        report = audit(store, rate_book)
        assert report.is_clean
        assert (report.amount_nanos, report.credited_nanos) == (350_000, 2 * DOLLAR + 350_000)

    @pytest.mark.parametrize(
        "tampering",
        [
            "UPDATE credits SET amount_nanos = amount_nanos + 1",
            "UPDATE credits SET account_id = 'ffffffffffffffffffffffffffffffff'",
            "DELETE FROM credits",
            "DELETE FROM ledger_transactions WHERE kind = 'top_up'",
            "UPDATE ledger_entries SET ledger_account = 'elsewhere' WHERE ledger_account = 'cash'",
        ],
    )
    def test_a_credit_that_was_tampered_with_is_found(
        self, store: Store, rate_book: RateBook, credit_book: CreditBook, tampering: str
    ) -> None:
        credit_book.top_up(ACCOUNT, DOLLAR, "Card")
        with store.writing() as connection:
            for table in ("credits", "ledger_transactions", "ledger_entries"):
                drop_guards(connection, table)
            connection.execute(text(tampering))
        assert "wrong_credit" in [finding.kind for finding in audit(store, rate_book).findings]

    def test_a_transaction_out_of_nowhere_is_found(self, store: Store, rate_book: RateBook) -> None:
        row = {
            "id": "made-up", "kind": "top_up", "occurred_at_us": 0, "posted_at_us": 0, "input_nanos": 0,
            "cached_input_nanos": 0, "output_nanos": 0, "amount_nanos": -5, "undiscounted_nanos": -5,
            "neurons_e4": 0, "rate_card_version": "",
        }  # fmt: skip
        with store.writing() as connection:
            connection.execute(insert(ledger_transactions), row)
        (finding,) = audit(store, rate_book).findings
        assert (finding.kind, finding.subject) == ("wrong_credit", "made-up")


class TestReplicas:
    def usage(self, **changes: Any) -> ReplicaUsage:
        fields: dict[str, Any] = {
            "replica_id": "replica-0", "request_id": "request-000000", "prompt_tokens": 1_000,
            "cached_prompt_tokens": 800, "completion_tokens": 50, "finished_at_us": NOON_US,
        }  # fmt: skip
        return ReplicaUsage(**(fields | changes))

    def found(self, store: Store, rate_book: RateBook, usage: ReplicaUsage, later_us: int) -> list[str]:
        report = audit(store, rate_book, replica_usages=[usage], clock=lambda: NOON_US + later_us)
        return [finding.kind for finding in report.findings]

    def test_the_same_counts_are_no_finding(self, store: Store, rate_book: RateBook) -> None:
        store.post([record()], rate_book)
        assert self.found(store, rate_book, self.usage(), DAY_US) == []

    @pytest.mark.parametrize("count", ["prompt_tokens", "cached_prompt_tokens", "completion_tokens"])
    def test_another_count_is_found(self, store: Store, rate_book: RateBook, count: str) -> None:
        store.post([record()], rate_book)
        assert self.found(store, rate_book, self.usage(**{count: 1}), 0) == ["wrong_replica_count"]

    def test_a_request_without_a_record_is_found_when_it_has_had_its_time(
        self, store: Store, rate_book: RateBook
    ) -> None:
        assert self.found(store, rate_book, self.usage(), 1_000_000) == []
        assert self.found(store, rate_book, self.usage(), 61_000_000) == ["unbilled_usage"]
        assert self.found(store, rate_book, self.usage(is_attempt=True), 61_000_000) == []

    def test_an_attempt_that_another_replica_finished_is_no_drift(
        self, store: Store, rate_book: RateBook
    ) -> None:
        store.post([record(replica_id="replica-1")], rate_book)
        assert self.found(store, rate_book, self.usage(completion_tokens=1), DAY_US) == []
