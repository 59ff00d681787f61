"""Sums over usage records that reports read instead of the records: by quarter-hour, day, session, latency.

They are kept in the transaction that posts a record, so that they always agree with it, whenever it comes.
Every one of them is a sum, so they can be rebuilt from the records at any time and come out the same.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any

from sqlalchemy import (
    ColumnElement,
    Connection,
    Engine,
    Row,
    Subquery,
    Table,
    and_,
    case,
    delete,
    func,
    literal,
    or_,
    select,
)

from billing import schema
from billing.buckets import bucket_start
from billing.bulk import BulkInsert
from billing.dialect import Dialect
from billing.latency import bucket_of, latencies_of
from billing.periods import MICROS_PER_DAY, MICROS_PER_SECOND
from billing.rates import Charge
from billing.usage import UsageRecord

MICROS_PER_QUARTER = 900 * MICROS_PER_SECOND
MICROS_PER_HOUR = 3_600 * MICROS_PER_SECOND

SUMS: tuple[str, ...] = tuple(
    column.name for column in schema.rollup_quarters.columns if not column.primary_key
)
ROLLUPS = (schema.rollup_quarters, schema.rollup_days, schema.rollup_sessions)
LATENCIES = (schema.latency_quarters, schema.latency_days)

_ROWS_PER_FETCH = 2_000

Amounts = tuple[int, int, int, int, int, int]
"""Nano-dollars of input, cached input, output, in all, in all without the discount; neurons_e4."""

Key = tuple[str | int, ...]
Sums = list[int]


class RollupBatch:
    """What a number of records adds to each table. Not thread-safe; use once."""

    def __init__(self) -> None:
        self._sums: dict[Key, Sums] = {}
        self._latencies: dict[Key, int] = {}

    def add(self, record: UsageRecord | Row[Any], amounts: Amounts) -> None:
        """Count one record that is new; a row of the table will do as well."""
        start_us = record.started_at_us - record.started_at_us % MICROS_PER_QUARTER
        key = (
            record.account_id,
            start_us,
            record.session,
            record.model,
            record.token_id,
            record.surface,
            record.status,
        )
        values = (
            1,
            int(record.is_estimated),
            record.prompt_tokens,
            record.cached_prompt_tokens,
            record.completion_tokens,
            record.reasoning_tokens,
            *amounts,
            max(record.finished_at_us - record.started_at_us, 0),
        )
        _add(self._sums, key, values)
        for metric, value in latencies_of(record):
            place = (record.account_id, start_us, record.model, record.token_id, metric, bucket_of(value))
            self._latencies[place] = self._latencies.get(place, 0) + 1

    def rows(self) -> Iterator[tuple[Table, list[Key]]]:
        """Rows for each table in the order of its columns, sorted by key."""
        yield schema.rollup_quarters, _summed(self._sums, lambda key: (*key[:2], *key[3:]))
        yield schema.rollup_days, _summed(self._sums, lambda key: (key[0], _day(key[1]), *key[3:]))
        yield schema.rollup_sessions, _summed(self._sums, lambda key: (key[0], _hour(key[1]), *key[2:]))
        yield schema.latency_quarters, sorted((*key, count) for key, count in self._latencies.items())
        days: dict[Key, int] = {}
        for key, count in self._latencies.items():
            place = (key[0], _day(key[1]), *key[2:])
            days[place] = days.get(place, 0) + count
        yield schema.latency_days, sorted((*key, count) for key, count in days.items())


class Rollups:
    """Adds to the tables, and rebuilds them. Immutable, thread-safe."""

    def __init__(self, engine: Engine, dialect: Dialect) -> None:
        self._dialect = dialect
        self._upserts = {
            table.name: BulkInsert(engine, table, dialect.insert_or_add) for table in (*ROLLUPS, *LATENCIES)
        }

    def add(self, connection: Connection, batch: RollupBatch) -> None:
        """Within the connection's transaction. Rows are touched in one order, so writers cannot deadlock."""
        for table, rows in batch.rows():
            self._upserts[table.name].execute(connection, rows)

    def rebuild(self, connection: Connection) -> int:
        """Empty the tables and count every record again; returns how many. Nothing is posted meanwhile."""
        for table in (*ROLLUPS, *LATENCIES):
            self._dialect.lock_table(connection, table)
        for table in (*ROLLUPS, *LATENCIES):
            connection.execute(delete(table))
        num_records = 0
        for rows in _priced_records(connection):
            batch = RollupBatch()
            for row in rows:
                batch.add(row, _amounts_in(row))
            self.add(connection, batch)
            num_records += len(rows)
        return num_records


def amounts_of(charge: Charge) -> Amounts:
    """What :meth:`RollupBatch.add` needs of a charge."""
    of_input, of_cached, of_output = [line.amount_nanos for line in charge.lines[:3]] or (0, 0, 0)
    return (
        of_input,
        of_cached,
        of_output,
        charge.amount_nanos,
        charge.undiscounted_nanos,
        charge.neurons_e4,
    )


def are_complete(connection: Connection) -> bool:
    """Whether the sums hold as many requests as there are records; false after a migration made them."""
    num_counted = connection.scalar(select(func.sum(schema.rollup_days.c.num_requests)))
    num_records = connection.scalar(select(func.count()).select_from(schema.usage_records))
    return int(num_counted or 0) == int(num_records or 0)


def find_drift(connection: Connection, max_found: int = 100) -> list[str]:
    """Where the sums differ from the records, in one line each; the database adds up both sides itself."""
    found: list[str] = []
    for table, width_us in (
        (schema.rollup_quarters, MICROS_PER_QUARTER),
        (schema.rollup_days, MICROS_PER_DAY),
        (schema.rollup_sessions, MICROS_PER_HOUR),
    ):
        expected = _summed_records(table, width_us)
        keys = [column.name for column in table.primary_key]
        is_same = and_(*(table.c[key] == expected.c[key] for key in keys))
        differs = or_(*(table.c[name] != expected.c[name] for name in SUMS))
        missing = (
            select(*(expected.c[key] for key in keys))
            .select_from(expected.outerjoin(table, is_same))
            .where(or_(table.c.account_id.is_(None), differs))
        )
        surplus = (
            select(*(table.c[key] for key in keys))
            .select_from(table.outerjoin(expected, is_same))
            .where(expected.c.account_id.is_(None))
        )
        for query in (missing, surplus):
            rows = connection.execute(query.limit(max_found - len(found)))
            found += [f"{table.name} is wrong for {dict(row._mapping)}" for row in rows]
    return found


def _summed_records(table: Table, width_us: int) -> Subquery:
    """The rows that ``table`` should hold, summed from the records."""
    usage, ledger = schema.usage_records.c, schema.ledger_transactions.c
    start_us = bucket_start(usage.started_at_us, width_us).label("start_us")
    keys = [
        start_us if column.name == "start_us" else usage[column.name] for column in table.primary_key.columns
    ]
    duration = usage.finished_at_us - usage.started_at_us
    values: dict[str, ColumnElement[Any]] = {
        "num_requests": literal(1),
        "num_estimated": case((usage.is_estimated, 1), else_=0),
        "duration_us": case((duration > 0, duration), else_=0),
    }
    for name in SUMS:
        if name not in values:
            values[name] = usage[name] if name in usage else func.coalesce(ledger[name], 0)
    return (
        select(*keys, *(func.sum(values[name]).label(name) for name in SUMS))
        .select_from(
            schema.usage_records.outerjoin(schema.ledger_transactions, ledger.id == usage.request_id)
        )
        .group_by(*keys)
        .subquery()
    )


def _priced_records(connection: Connection) -> Iterator[Sequence[Row[Any]]]:
    """All records with their transactions, in pages by request id, so that memory stays bounded."""
    usage, ledger = schema.usage_records, schema.ledger_transactions
    query = (
        select(
            usage,
            *(func.coalesce(ledger.c[name], 0).label(name) for name in SUMS if name in ledger.c),
        )
        .select_from(usage.outerjoin(ledger, ledger.c.id == usage.c.request_id))
        .order_by(usage.c.request_id)
        .limit(_ROWS_PER_FETCH)
    )
    last = ""
    while rows := connection.execute(query.where(usage.c.request_id > last)).all():
        yield rows
        last = rows[-1].request_id


def _amounts_in(row: Row[Any]) -> Amounts:
    return (
        row.input_nanos,
        row.cached_input_nanos,
        row.output_nanos,
        row.amount_nanos,
        row.undiscounted_nanos,
        row.neurons_e4,
    )


def _add(sums: dict[Key, Sums], key: Key, values: Iterable[int]) -> None:
    known = sums.get(key)
    if known is None:
        sums[key] = list(values)
    else:
        for index, value in enumerate(values):
            known[index] += value


def _summed(sums: dict[Key, Sums], coarser: Callable[[Key], Key]) -> list[Key]:
    merged: dict[Key, Sums] = {}
    for key, values in sums.items():
        _add(merged, coarser(key), values)
    return sorted((*key, *values) for key, values in merged.items())


def _day(start_us: str | int) -> int:
    return int(start_us) - int(start_us) % MICROS_PER_DAY


def _hour(start_us: str | int) -> int:
    return int(start_us) - int(start_us) % MICROS_PER_HOUR
