"""Questions about usage, compared with sums over the records in plain Python."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Sequence
from statistics import median
from typing import Any

import pytest
from sqlalchemy import text

from billing.analytics import (
    Dimension,
    Order,
    UsageFilter,
    UsageGroup,
    can_have_latency,
    latencies,
    usage_groups,
)
from billing.periods import MICROS_PER_DAY, Period, day_start_us, parse_date
from billing.rates import RateBook
from billing.rollups import MICROS_PER_HOUR, MICROS_PER_QUARTER
from billing.store import QueryTimeoutError, Store
from billing.usage import UsageRecord
from billing.usage_log import find_request, usage_requests
from tests.support.ledger import ACCOUNT, KIMI, NOON_US, OTHER_ACCOUNT, PLAIN, record
from tests.unit.billing.test_rollups import varied

MIDNIGHT_US = day_start_us(parse_date("2026-11-30"))
KEYS: dict[Dimension, Callable[[UsageRecord], str | int]] = {
    "quarter": lambda one: one.started_at_us // MICROS_PER_QUARTER * MICROS_PER_QUARTER,
    "hour": lambda one: one.started_at_us // MICROS_PER_HOUR * MICROS_PER_HOUR,
    "day": lambda one: one.started_at_us // MICROS_PER_DAY * MICROS_PER_DAY,
    "account": lambda one: one.account_id,
    "model": lambda one: one.model,
    "token": lambda one: one.token_id,
    "session": lambda one: one.session,
    "surface": lambda one: one.surface,
    "status": lambda one: one.status,
}


@pytest.fixture
def filled(store: Store, rate_book: RateBook) -> tuple[Store, list[UsageRecord]]:
    made = varied(400, seed=3)
    store.post(made, rate_book)
    return store, made


def groups(store: Store, wanted: UsageFilter, by: Sequence[Dimension], **options: Any) -> list[UsageGroup]:
    with store.reading() as connection:
        return usage_groups(connection, wanted, by, limit=1_000, **options).rows


@pytest.mark.slow
@pytest.mark.parametrize(
    "by",
    [
        (),
        ("day",),
        ("hour",),
        ("quarter", "model"),
        ("model",),
        ("token",),
        ("session",),
        ("day", "session"),
        ("account", "status"),
        ("surface",),
    ],
)
@pytest.mark.parametrize(
    "wanted",
    [
        UsageFilter(),
        UsageFilter(account_id=ACCOUNT, models=(KIMI, PLAIN)),
        UsageFilter(statuses=("ok",), period=Period(MIDNIGHT_US, MIDNIGHT_US + MICROS_PER_DAY)),
        UsageFilter(sessions=("s-1", "s-2", "s-3"), period=Period(NOON_US, NOON_US + 2 * MICROS_PER_HOUR)),
    ],
)
def test_groups_equal_sums_over_the_records(
    filled: tuple[Store, list[UsageRecord]],
    rate_book: RateBook,
    by: tuple[Dimension, ...],
    wanted: UsageFilter,
) -> None:
    store, made = filled
    if wanted.sessions and "quarter" in by:
        with pytest.raises(ValueError, match="by the hour"):
            groups(store, wanted, by)
        return
    expected: dict[tuple[str | int, ...], list[int]] = defaultdict(lambda: [0, 0, 0, 0])
    for one in made:
        if matches(one, wanted):
            sums = expected[tuple(KEYS[dimension](one) for dimension in by)]
            for index, value in enumerate(
                (1, one.cached_prompt_tokens, rate_book.price(one).amount_nanos, one.completion_tokens)
            ):
                sums[index] += value
    found = {
        tuple(row.dimensions.values()): [
            row.num_requests,
            row.cached_prompt_tokens,
            row.amount_nanos,
            row.completion_tokens,
        ]
        for row in groups(store, wanted, by)
    }
    assert found == (expected or {(): [0, 0, 0, 0]} if not by else dict(expected))


def matches(one: UsageRecord, wanted: UsageFilter) -> bool:
    start, end = wanted.period.start_us, wanted.period.end_us
    return (
        wanted.account_id in (None, one.account_id)
        and (not wanted.models or one.model in wanted.models)
        and (not wanted.sessions or one.session in wanted.sessions)
        and (not wanted.statuses or one.status in wanted.statuses)
        and (start is None or one.started_at_us >= start)
        and (end is None or one.started_at_us < end)
    )


def test_a_period_is_widened_to_whole_buckets_and_says_so(store: Store, rate_book: RateBook) -> None:
    store.post([record(0, started_at_us=NOON_US + 1)], rate_book)
    with store.reading() as connection:
        page = usage_groups(connection, UsageFilter(period=Period(NOON_US + 5, NOON_US + 6)), ())
        assert page.period == Period(NOON_US, NOON_US + MICROS_PER_QUARTER)
        assert page.rows[0].num_requests == 1
        page = usage_groups(connection, UsageFilter(period=Period(NOON_US + 5, None)), ("session",))
        assert page.period == Period(NOON_US, None)


@pytest.mark.parametrize("order", [(), (Order("amount_nanos", True),), (Order("day", True),)])
def test_pages_make_up_the_whole(filled: tuple[Store, list[UsageRecord]], order: tuple[Order, ...]) -> None:
    store, _ = filled
    by: tuple[Dimension, ...] = ("day", "model", "status")
    whole = groups(store, UsageFilter(), by, order=order)
    pages: list[UsageGroup] = []
    after = None
    with store.reading() as connection:
        while True:
            page = usage_groups(connection, UsageFilter(), by, order=order, limit=7, after=after)
            pages += page.rows
            after = page.next_after
            if after is None:
                break
            assert len(page.rows) == 7
    assert pages == whole
    if order and order[0].by == "amount_nanos":
        amounts = [row.amount_nanos for row in pages]
        assert amounts == sorted(amounts, reverse=True)


def test_a_cursor_of_another_question_is_refused(filled: tuple[Store, list[UsageRecord]]) -> None:
    store, _ = filled
    with store.reading() as connection, pytest.raises(ValueError, match="another grouping"):
        usage_groups(connection, UsageFilter(), ("model",), after=("a", "b"))


def test_small_requests_can_be_left_out(filled: tuple[Store, list[UsageRecord]], rate_book: RateBook) -> None:
    store, made = filled
    least = 40_000_000
    expected = [one for one in made if rate_book.price(one).neurons_e4 >= least]
    assert 0 < len(expected) < len(made)
    [found] = groups(store, UsageFilter(min_neurons_e4=least), ())
    assert found.num_requests == len(expected)
    assert found.prompt_tokens == sum(one.prompt_tokens for one in expected)


def test_percentiles_are_those_of_the_records(filled: tuple[Store, list[UsageRecord]]) -> None:
    store, made = filled
    wanted = UsageFilter(account_id=ACCOUNT)
    with store.reading() as connection:
        found = latencies(connection, wanted, ("model",))
        [whole] = latencies(connection, wanted).values()
    for (model,), summary in found.items():
        true = median(
            one.ttft_us for one in made
            if one.ttft_us and one.is_charged and one.model == model and one.account_id == ACCOUNT
        )  # fmt: skip
        assert summary.ttft_ms_p50 is not None
        assert abs(summary.ttft_ms_p50 * 1_000 - true) / true < 0.15  # of some dozens; buckets and ranks
    assert whole.num_ttft == sum(summary.num_ttft for summary in found.values())
    assert not can_have_latency(wanted, ("session",))
    assert not can_have_latency(UsageFilter(statuses=("ok",)), ())
    with store.reading() as connection, pytest.raises(ValueError, match="are kept by"):
        latencies(connection, wanted, ("session",))


def test_requests_come_newest_first_a_page_at_a_time(filled: tuple[Store, list[UsageRecord]]) -> None:
    store, made = filled
    wanted = UsageFilter(account_id=OTHER_ACCOUNT, statuses=("ok", "error"), period=Period(None, NOON_US))
    expected = sorted(
        (one for one in made if matches(one, wanted)),
        key=lambda one: (one.started_at_us, one.request_id),
        reverse=True,
    )
    found = []
    after = None
    with store.reading() as connection:
        while True:
            page = usage_requests(connection, wanted, limit=13, after=after)
            found += page.rows
            after = page.next_after
            if after is None:
                break
        ascending = usage_requests(connection, wanted, limit=1_000, is_ascending=True).rows
    assert [row.request_id for row in found] == [one.request_id for one in expected]
    assert ascending == found[::-1]


def test_a_request_is_found_by_its_own_account_only(store: Store, rate_book: RateBook) -> None:
    store.post([record(1)], rate_book)
    with store.reading() as connection:
        found = find_request(connection, ACCOUNT, "request-000001")
        assert found is not None
        assert found.amount_nanos == 350_000
        assert found.as_json()["amount"] == "0.00035"
        assert find_request(connection, OTHER_ACCOUNT, "request-000001") is None
        assert find_request(connection, None, "request-000001") == found


def test_a_question_that_takes_too_long_ends(store: Store) -> None:
    endless = "WITH RECURSIVE n(i) AS (SELECT 1 UNION ALL SELECT i + 1 FROM n) SELECT count(*) FROM n"
    with (
        pytest.raises(QueryTimeoutError, match="took longer"),
        store.reading_within(0.05) as connection,
    ):
        connection.execute(text(endless))
    with store.reading_within(5) as connection:
        assert connection.scalar(text("SELECT 1")) == 1
