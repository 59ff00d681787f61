from __future__ import annotations

from pathlib import Path

import msgspec
import pytest
from sqlalchemy import text

from billing.audit import AuditReport, audit
from billing.config import SpoolConfig
from billing.rates import RateBook
from billing.schema import APPEND_ONLY
from billing.spool import Spool
from billing.store import Store
from tests.support.ledger import NOON_US, book, card, drop_guards, record, records


def kinds(report: AuditReport) -> list[str]:
    return [finding.kind for finding in report.findings]


@pytest.fixture
def tampered(store: Store, rate_book: RateBook) -> Store:
    """Five records, and the guards taken away, as someone with access to the database could."""
    store.post([record(number) for number in range(5)], rate_book)
    with store.writing() as connection:
        for table in APPEND_ONLY:
            drop_guards(connection, table)
    return store


def test_right_books_have_no_findings(store: Store, rate_book: RateBook) -> None:
    store.post(records(300), rate_book)
    report = audit(store, rate_book, clock=lambda: NOON_US)
    assert report.is_clean
    assert (report.num_records, report.num_transactions, report.num_entries) == (300, 300, 600)
    assert report.checked_at == "2026-11-30T12:00:00.000000Z"
    assert msgspec.json.decode(msgspec.json.encode(report))["findings"] == []


def test_empty_books_are_right(store: Store, rate_book: RateBook) -> None:
    assert audit(store, rate_book).is_clean


@pytest.mark.parametrize(
    ("tampering", "found"),
    [
        (
            "UPDATE ledger_entries SET amount_nanos = amount_nanos + 1 "
            "WHERE transaction_id = 'request-000002' AND leg = 0",
            ["unbalanced_transaction", "unbalanced_ledger", "wrong_entries"],
        ),
        (
            "UPDATE ledger_entries SET amount_nanos = 2 * amount_nanos "
            "WHERE transaction_id = 'request-000002'",
            ["wrong_entries"],
        ),
        (
            "UPDATE ledger_entries SET ledger_account = 'receivable:someone-else' "
            "WHERE transaction_id = 'request-000002' AND leg = 0",
            ["wrong_entries"],
        ),
        ("DELETE FROM ledger_entries WHERE transaction_id = 'request-000002'", ["wrong_entries"]),
        (
            "INSERT INTO ledger_entries VALUES ('request-000002', 2, 'revenue:x', 0)",
            ["wrong_entries"],
        ),
        (
            "DELETE FROM ledger_transactions WHERE id = 'request-000002'",
            ["record_without_transaction", "entries_without_transaction"],
        ),
        (
            "DELETE FROM usage_records WHERE request_id = 'request-000002'",
            ["transaction_without_record"],
        ),
        (
            "UPDATE usage_records SET completion_tokens = 51 WHERE request_id = 'request-000002'",
            ["wrong_price"],
        ),
        (
            "UPDATE usage_records SET cached_prompt_tokens = 1001 WHERE request_id = 'request-000002'",
            ["invalid_record"],
        ),
        (
            "UPDATE usage_records SET status = 'replica_lost' WHERE request_id = 'request-000002'",
            ["wrong_price"],
        ),
        (
            "UPDATE ledger_transactions SET neurons_e4 = neurons_e4 + 1 WHERE id = 'request-000002'",
            ["wrong_price"],
        ),
        (
            "UPDATE ledger_transactions SET undiscounted_nanos = 0 WHERE id = 'request-000002'",
            ["wrong_price"],
        ),
    ],
)
def test_every_kind_of_drift_is_found(
    tampered: Store, rate_book: RateBook, tampering: str, found: list[str]
) -> None:
    with tampered.writing() as connection:
        connection.execute(text(tampering))
    report = audit(tampered, rate_book)
    is_in_sums = "ledger_entries" not in tampering  # the sums were right, and so the records are wrong
    derived = ("wrong_rollup", "wrong_receipt")
    assert [kind for kind in kinds(report) if kind not in derived] == found
    assert ("wrong_rollup" in kinds(report)) == is_in_sums
    assert report.num_findings == len(kinds(report))
    assert not report.is_clean
    assert report.findings[0].subject == "request-000002"


def test_a_card_that_was_changed_afterwards_is_found(store: Store, rate_book: RateBook) -> None:
    store.post([record()], rate_book)
    report = audit(store, book(card(output="3.01")))
    assert kinds(report) == ["wrong_price"]
    assert "2026-01-01 600000/100000/3010000" in report.findings[0].detail


def test_a_card_that_was_removed_is_found(store: Store, rate_book: RateBook) -> None:
    store.post([record()], rate_book)
    assert kinds(audit(store, book(card("another")))) == ["wrong_price"]


def test_a_card_that_reaches_back_is_one_finding(store: Store, rate_book: RateBook) -> None:
    store.post([record(number) for number in range(40)], rate_book)
    report = audit(store, book(card(), card(effective_from="2026-11-30", output="9")))
    assert [(each.kind, each.subject) for each in report.findings] == [("wrong_price", record().model)]
    detail = report.findings[0].detail
    assert detail.startswith("40 requests were billed with card '2026-01-01 ")
    assert "card '2026-11-30 " in detail
    assert f"({', '.join(record(number).request_id for number in range(5))}, ...)" in detail
    assert "billing.rate_cards" in detail


def test_a_later_card_changes_nothing_before_it(store: Store, rate_book: RateBook) -> None:
    store.post([record()], rate_book)
    assert audit(store, book(card(), card(effective_from="2026-12-01", output="9"))).is_clean


def test_records_without_a_card_or_an_account_are_found(store: Store, rate_book: RateBook) -> None:
    store.post([record(0, model="@cf/unknown"), record(1, account_id="e" * 32)], rate_book)
    assert kinds(audit(store, rate_book)) == ["unknown_account", "unpriced_record"]


def test_findings_are_bounded_and_all_counted(store: Store, rate_book: RateBook) -> None:
    store.post([record(number, model="@cf/unknown") for number in range(50)], rate_book)
    report = audit(store, rate_book, max_findings=10)
    assert (len(report.findings), report.num_findings) == (10, 50)


class TestSpool:
    @pytest.fixture
    def spool_directory(self, tmp_path: Path, store: Store, rate_book: RateBook) -> Path:
        """Three records that finished half a second after noon; the first is in the store as well."""
        spool = Spool(tmp_path / "spool", SpoolConfig())
        spool.append([record(0), record(1), record(2)])
        spool.close()
        store.post([record(0)], rate_book)
        return tmp_path / "spool"

    def test_what_is_in_flight_is_no_finding(
        self, store: Store, rate_book: RateBook, spool_directory: Path
    ) -> None:
        report = audit(store, rate_book, spool_directory=spool_directory, clock=lambda: NOON_US + 30_000_000)
        assert (report.num_spooled, report.findings) == (3, [])

    def test_what_was_left_behind_is(self, store: Store, rate_book: RateBook, spool_directory: Path) -> None:
        report = audit(store, rate_book, spool_directory=spool_directory, clock=lambda: NOON_US + 61_000_000)
        assert [(finding.kind, finding.subject) for finding in report.findings] == [
            ("unposted_record", "request-000001"),
            ("unposted_record", "request-000002"),
        ]
