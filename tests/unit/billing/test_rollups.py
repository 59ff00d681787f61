"""The sums agree with the records, however these come, and with a rebuild."""

from __future__ import annotations

import random
from collections import Counter
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from sqlalchemy import Connection, delete, select, update

from billing import schema
from billing.latency import BOUNDS, LatencySummary, bucket_of, latencies_of, percentile, summarize
from billing.periods import MICROS_PER_DAY
from billing.rates import RateBook
from billing.rollups import LATENCIES, ROLLUPS, SUMS, are_complete, find_drift
from billing.store import Store
from billing.usage import UsageRecord
from tests.support.ledger import ACCOUNT, NOON_US, OTHER_ACCOUNT, book, groups_of, record, records

TABLES = (*ROLLUPS, *LATENCIES)


def contents(connection: Connection) -> dict[str, list[tuple[Any, ...]]]:
    return {table.name: sorted(tuple(row) for row in connection.execute(select(table))) for table in TABLES}


def varied(count: int, seed: int) -> list[UsageRecord]:
    """Records of two accounts, many sessions, with latencies, late and early."""
    draw = random.Random(seed)
    made = []
    for number, one in enumerate(records(count, seed)):
        started = one.started_at_us + draw.randrange(7_200) * 1_000_000
        made.append(
            record(
                number,
                **{
                    name: getattr(one, name)
                    for name in UsageRecord.__struct_fields__
                    if name not in ("account_id", "session", "started_at_us", "finished_at_us", "ttft_us")
                },
                account_id=draw.choice([ACCOUNT, OTHER_ACCOUNT]),
                session=f"s-{draw.randrange(20)}",
                started_at_us=started,
                finished_at_us=started + draw.randrange(60_000_000),
                ttft_us=draw.choice([0, draw.randrange(1, 5_000_000)]),
            )
        )
    return made


def test_each_table_sums_what_was_posted(store: Store, rate_book: RateBook) -> None:
    given_records = varied(700, seed=1)
    for group in groups_of(given_records, 90):
        store.post(group, rate_book)
    charges = {one.request_id: rate_book.price(one) for one in given_records}
    expected: Counter[tuple[str, int, str]] = Counter()
    for one in given_records:
        day = one.started_at_us // MICROS_PER_DAY * MICROS_PER_DAY
        expected[one.account_id, day, one.status] += charges[one.request_id].amount_nanos
    found: Counter[tuple[str, int, str]] = Counter()
    with store.reading() as connection:
        for row in connection.execute(select(schema.rollup_days)):
            found[row.account_id, row.start_us, row.status] += row.amount_nanos
        totals = [sum(row.prompt_tokens for row in connection.execute(select(table))) for table in ROLLUPS]
        with_ttft = sum(
            row.num_requests
            for row in connection.execute(
                select(schema.latency_days).where(schema.latency_days.c.metric == "ttft_us")
            )
        )
        assert find_drift(connection) == []
    assert found == expected
    assert totals == [sum(one.prompt_tokens for one in given_records)] * 3
    streamed = [one for one in given_records if one.ttft_us > 0 and one.is_charged]
    assert with_ttft == sum(
        one.completion_tokens > 0
        and (one.completion_tokens == 1 or _rest_us(one) >= 500 * one.completion_tokens)
        for one in streamed
    )
    assert 0 < with_ttft < len(streamed)  # of random times some say that the answer came in one piece


def _rest_us(one: UsageRecord) -> int:
    return one.finished_at_us - one.started_at_us - one.ttft_us


@pytest.mark.parametrize(
    ("fields", "metrics"),
    [
        ({"ttft_us": 200_000, "completion_tokens": 51}, {"ttft_us": 200_000, "speed_milli": 62_500}),
        ({"ttft_us": 900_000, "completion_tokens": 1}, {"ttft_us": 900_000}),
        ({"ttft_us": 0, "completion_tokens": 51}, {}),
        ({"ttft_us": 999_458, "completion_tokens": 8}, {}),
        ({"ttft_us": 1_000_201, "completion_tokens": 8}, {}),
        ({"ttft_us": 400_000, "completion_tokens": 0}, {}),
        ({"ttft_us": 200_000, "completion_tokens": 51, "status": "replica_lost"}, {}),
    ],
    ids=["stream", "one token", "one piece", "old one piece", "later than its end", "embeddings", "lost"],
)
def test_latencies_are_those_of_streams(fields: dict[str, Any], metrics: dict[str, int]) -> None:
    whole = {"started_at_us": NOON_US, "finished_at_us": NOON_US + 1_000_000, "reasoning_tokens": 0}
    assert dict(latencies_of(record(1, **whole | fields))) == metrics


@pytest.mark.slow
@settings(max_examples=8, deadline=None)
@given(seed=st.integers(0, 10_000), size=st.integers(1, 120), overlap=st.integers(0, 30))
def test_rebuilt_sums_equal_those_that_were_kept(
    tmp_path_factory: pytest.TempPathFactory, seed: int, size: int, overlap: int
) -> None:
    """Batches of any size, in any order, some records twice, some in one batch twice."""
    store = Store.open(
        f"sqlite:///{tmp_path_factory.mktemp('rollups') / 'ledger.db'}", sqlite_synchronous="normal"
    )
    try:
        draw = random.Random(seed)
        made = varied(150, seed)
        made += draw.choices(made, k=overlap)
        draw.shuffle(made)
        for group in groups_of(made, size):
            store.post(group, book())
        with store.reading() as connection:
            kept = contents(connection)
            assert find_drift(connection) == []
        assert store.rebuild_rollups() == 150
        with store.reading() as connection:
            assert contents(connection) == kept
    finally:
        store.close()


def test_the_first_of_one_id_counts(store: Store, rate_book: RateBook) -> None:
    store.post([record(prompt_tokens=1_000), record(prompt_tokens=2_000)], rate_book)
    store.post([record(prompt_tokens=3_000)], rate_book)
    with store.reading() as connection:
        assert connection.scalars(select(schema.rollup_days.c.prompt_tokens)).all() == [1_000]


def test_drift_is_found_and_mended(store: Store, rate_book: RateBook) -> None:
    store.post(records(50), rate_book)
    with store.writing() as connection:
        connection.execute(
            update(schema.rollup_days).values(amount_nanos=schema.rollup_days.c.amount_nanos + 1)
        )
    with store.reading() as connection:
        assert any("rollup_days is wrong" in line for line in find_drift(connection))
    store.rebuild_rollups()
    with store.reading() as connection:
        assert find_drift(connection) == []


def test_a_surplus_row_is_drift(store: Store, rate_book: RateBook) -> None:
    store.post([record()], rate_book)
    with store.writing() as connection:
        row = dict(connection.execute(select(schema.rollup_quarters)).one()._mapping)
        connection.execute(schema.rollup_quarters.insert(), row | {"model": "another"})
    with store.reading() as connection:
        assert len(find_drift(connection)) == 1


def test_an_older_database_is_counted_when_it_is_migrated(
    store: Store, rate_book: RateBook, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As it is after the migration that makes the tables: they are there and empty."""
    store.post(records(20), rate_book)
    with store.writing() as connection:
        kept = contents(connection)
        for table in TABLES:
            connection.execute(delete(table))
        assert not are_complete(connection)
    monkeypatch.setattr("billing.store._revision", lambda connection: "0001")
    monkeypatch.setattr("billing.migrate.upgrade", lambda connection: None)
    again = Store.open(str(store._engine.url), clock=lambda: NOON_US)
    with again.reading() as connection:
        assert contents(connection) == kept
        assert are_complete(connection)
    again.close()


def test_the_sums_are_those_of_every_table() -> None:
    for table in ROLLUPS:
        assert tuple(column.name for column in table.columns if not column.primary_key) == SUMS


class TestLatency:
    def test_a_percentile_is_within_the_stated_error(self) -> None:
        draw = random.Random(5)
        values = sorted(int(draw.lognormvariate(13, 1.2)) + 1 for _ in range(4_000))
        counts = Counter(bucket_of(value) for value in values)
        for share in (0.5, 0.9, 0.99):
            true = values[int(share * len(values)) - 1]
            assert abs(percentile(counts.items(), share) - true) / true < 0.046

    def test_small_values_are_exact(self) -> None:
        for value in range(1, 9):
            assert percentile([(bucket_of(value), 1)], 0.5) == value

    def test_what_exceeds_the_scale_stays_on_it(self) -> None:
        assert percentile([(bucket_of(2**60), 3)], 0.5) == BOUNDS[-1]

    def test_nothing_has_no_percentile(self) -> None:
        assert summarize({}, {}) == LatencySummary()
        with pytest.raises(ValueError, match="no latencies"):
            percentile([], 0.5)

    def test_the_slow_end_of_speed_is_the_low_one(self) -> None:
        speed = {bucket_of(milli): 1 for milli in range(10_000, 110_000, 1_000)}
        found = summarize({}, speed)
        assert found.tokens_per_second_p99 is not None
        assert found.tokens_per_second_p50 is not None
        assert found.tokens_per_second_p99 < 15 < found.tokens_per_second_p50
