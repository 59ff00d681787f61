from __future__ import annotations

import msgspec
import pytest

from billing.periods import MICROS_PER_DAY, Period, day_start_us, parse_date
from billing.rates import RateBook
from billing.reports import GroupBy, balance_nanos, usage_summary
from billing.store import Store
from tests.support.ledger import ACCOUNT, FREE, KIMI, NOON_US, OTHER_ACCOUNT, PLAIN, record, records

MIDNIGHT_US = day_start_us(parse_date("2026-12-01"))


def test_nothing_is_a_total_of_zeros(store: Store) -> None:
    summary = usage_summary(store, by="model")
    assert summary.rows == []
    assert (summary.total.num_requests, summary.total.cached_share, summary.total.amount) == (0, 0.0, "0.00")


def test_the_discount_can_be_seen(store: Store, rate_book: RateBook) -> None:
    """Two turns of a conversation: the second is cheaper than it would be without the cache."""
    store.post(
        [record(0, cached_prompt_tokens=0), record(3, prompt_tokens=1_200, cached_prompt_tokens=1_040)],
        rate_book,
    )
    (row,) = usage_summary(store, by="session").rows
    assert (row.key, row.account_id, row.num_requests) == ("session-0", ACCOUNT, 2)
    assert (row.prompt_tokens, row.cached_prompt_tokens, row.cached_share) == (2_200, 1_040, 1_040 / 2_200)
    assert row.amount_nanos == 1_000 * 600 + 160 * 600 + 1_040 * 100 + 2 * 50 * 3_000
    assert row.discount_nanos == 1_040 * 500 == row.undiscounted_nanos - row.amount_nanos
    assert row.amount == "0.0011"


def test_requests_are_counted_by_status(store: Store, rate_book: RateBook) -> None:
    store.post(
        [
            record(0),
            record(1, status="client_disconnected"),
            record(2, status="replica_lost"),
            record(3, status="replica_lost", is_estimated=True),
            record(4, status="timeout"),
        ],
        rate_book,
    )
    total = usage_summary(store).total
    assert total.num_by_status == {
        "ok": 1,
        "client_disconnected": 1,
        "replica_lost": 2,
        "timeout": 1,
        "error": 0,
    }
    assert total.num_estimated == 1
    assert total.prompt_tokens == 5_000
    assert total.amount_nanos == 2 * 350_000


@pytest.mark.parametrize("by", ["model", "session", "day", "account", "request"])
def test_rows_add_up_to_the_total(store: Store, rate_book: RateBook, by: GroupBy) -> None:
    store.post(records(200), rate_book)
    summary = usage_summary(store, by=by)
    for name in ("num_requests", "prompt_tokens", "completion_tokens", "amount_nanos", "undiscounted_nanos"):
        assert sum(getattr(row, name) for row in summary.rows) == getattr(summary.total, name)
    assert sum(round(row.neurons * 10_000) for row in summary.rows) == round(summary.total.neurons * 10_000)
    assert summary.total.num_requests == 200
    assert not summary.is_truncated


def test_the_dearest_comes_first(store: Store, rate_book: RateBook) -> None:
    store.post(
        [record(0, model=FREE), record(1, model=KIMI), record(2, model=PLAIN), record(3, model=PLAIN)],
        rate_book,
    )
    assert [row.key for row in usage_summary(store, by="model").rows] == [PLAIN, KIMI, FREE]


def test_days_are_utc_and_half_open(store: Store, rate_book: RateBook) -> None:
    """BR-32: a request at exactly 00:00:00 belongs to the new day."""
    store.post(
        [
            record(0, started_at_us=MIDNIGHT_US - 1, finished_at_us=MIDNIGHT_US + 9),
            record(1, started_at_us=MIDNIGHT_US),
            record(2, started_at_us=MIDNIGHT_US + MICROS_PER_DAY - 1),
            record(3, started_at_us=MIDNIGHT_US + MICROS_PER_DAY),
        ],
        rate_book,
    )
    rows = usage_summary(store, by="day").rows
    assert [(row.key, row.num_requests) for row in rows] == [
        ("2026-11-30", 1),
        ("2026-12-01", 2),
        ("2026-12-02", 1),
    ]
    one_day = Period(MIDNIGHT_US, MIDNIGHT_US + MICROS_PER_DAY)
    summary = usage_summary(store, period=one_day)
    assert summary.total.num_requests == 2
    assert (summary.since, summary.until) == ("2026-12-01T00:00:00.000000Z", "2026-12-02T00:00:00.000000Z")


def test_accounts_see_only_their_own(store: Store, rate_book: RateBook) -> None:
    store.post(
        [record(0), record(1, account_id=OTHER_ACCOUNT), record(4, account_id=OTHER_ACCOUNT)], rate_book
    )
    assert usage_summary(store, account_id=OTHER_ACCOUNT).total.num_requests == 2
    assert [row.key for row in usage_summary(store, by="account").rows] == [OTHER_ACCOUNT, ACCOUNT]
    by_session = usage_summary(store, by="session").rows
    assert {(row.account_id, row.key) for row in by_session} == {
        (ACCOUNT, "session-0"),
        (OTHER_ACCOUNT, "session-1"),
    }
    assert balance_nanos(store, OTHER_ACCOUNT) == 700_000
    assert balance_nanos(store, "0" * 32) == 0


def test_the_same_session_of_two_accounts_is_two(store: Store, rate_book: RateBook) -> None:
    store.post([record(0), record(3, account_id=OTHER_ACCOUNT)], rate_book)
    assert [row.key for row in usage_summary(store, by="session").rows] == ["session-0", "session-0"]


def test_many_rows_are_cut_and_said_so(store: Store, rate_book: RateBook) -> None:
    store.post([record(number, session=f"s-{number}") for number in range(30)], rate_book)
    summary = usage_summary(store, by="session", max_rows=10)
    assert (len(summary.rows), summary.is_truncated, summary.total.num_requests) == (10, True, 30)


def test_a_request_can_be_looked_at_by_itself(store: Store, rate_book: RateBook) -> None:
    store.post([record(number, started_at_us=NOON_US + number) for number in range(3)], rate_book)
    rows = usage_summary(store, by="request").rows
    assert [row.key for row in rows] == ["request-000000", "request-000001", "request-000002"]
    assert {row.amount for row in rows} == {"0.00035"}


def test_is_json_as_it_stands(store: Store, rate_book: RateBook) -> None:
    store.post([record()], rate_book)
    decoded = msgspec.json.decode(msgspec.json.encode(usage_summary(store, by="model", currency="EUR")))
    assert decoded["currency"] == "EUR"
    assert decoded["rows"][0]["key"] == KIMI
    assert decoded["rows"][0]["amount_nanos"] == 350_000
    assert decoded["total"]["neurons"] == 31.8182
