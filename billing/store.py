"""The database: usage records, transactions and ledger entries, accounts.

SQLite by default, PostgreSQL by URL. Usage and ledger tables are append-only: triggers refuse anything else.
Posting is idempotent: a request id that exists is skipped in all three tables, and since they are only ever
written together, in one database transaction, it is there in all of them or in none.
"""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable, Collection, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

import msgspec
from sqlalchemy import Connection, Engine, Table, inspect, make_url, select, text
from sqlalchemy.exc import (
    ArgumentError,
    DBAPIError,
    IntegrityError,
    InterfaceError,
    NoSuchModuleError,
    OperationalError,
    ProgrammingError,
)
from sqlalchemy.exc import TimeoutError as PoolTimeoutError

from billing import schema
from billing.bulk import BulkInsert, Row
from billing.config import BillingConfig
from billing.dialect import Dialect, dialect_named
from billing.ledger import charge_transaction
from billing.rates import UNPRICED, Charge, NoRateError, RateBook
from billing.rollups import RollupBatch, Rollups, amounts_of, are_complete
from billing.usage import UsageRecord

_MAX_IDS_PER_QUERY = 500


class StoreError(RuntimeError):
    """The database cannot be opened or does not answer. Trying again later may help."""


class StoreAwayError(StoreError):
    """The database does not answer now."""


class QueryTimeoutError(StoreError):
    """A question took longer than it may."""


class PostResult(msgspec.Struct, frozen=True):
    """What one call of :meth:`Store.post` did. ``num_unpriced`` of the records had no rate card in force."""

    num_posted: int
    num_duplicates: int
    num_unpriced: int


class Store:
    """One database. Synchronous, thread-safe; every ``reading`` or ``writing`` block is one transaction."""

    def __init__(self, engine: Engine, dialect: Dialect, clock: Callable[[], int]) -> None:
        """Use :meth:`open`."""
        self._engine = engine
        self._writing_engine = dialect.writing(engine)
        self._dialect = dialect
        self._clock = clock
        self._is_current = False
        self._schema_lock = threading.Lock()
        self._usage_insert = _skipping_insert(engine, dialect, schema.usage_records)
        self._transaction_insert = _skipping_insert(engine, dialect, schema.ledger_transactions)
        self._entry_insert = _skipping_insert(engine, dialect, schema.ledger_entries)
        self._rollups = Rollups(engine, dialect)

    @classmethod
    def open(
        cls,
        url: str,
        *,
        sqlite_synchronous: str = "full",
        clock: Callable[[], int] = lambda: time.time_ns() // 1_000,
        may_be_away: bool = False,
    ) -> Store:
        """Connect and bring the schema up to date.

        Args:
            url: of SQLAlchemy's form, ``sqlite:///path`` or ``postgresql+psycopg://...``.
            sqlite_synchronous: ``full`` or ``normal``, see :class:`billing.config.BillingConfig`.
            clock: UTC microseconds, for the time of posting.
            may_be_away: a database that does not answer is no error yet; the first use that it answers
                brings the schema up to date.

        Raises:
            StoreError: in one sentence, what is wrong with the URL or the database.
        """
        try:
            dialect = dialect_named(make_url(url).get_backend_name())
            engine = dialect.connect(url, sqlite_synchronous)
        except (ArgumentError, NoSuchModuleError, ImportError, OSError, ValueError) as error:
            raise StoreError(f"cannot use the database {_shown(url)}: {error}") from error
        store = cls(engine, dialect, clock)
        try:
            store.bring_up_to_date()
        except StoreAwayError:
            if not may_be_away:
                engine.dispose()
                raise
        except BaseException:
            engine.dispose()
            raise
        return store

    @classmethod
    def of_config(cls, config: BillingConfig, data_dir: Path, *, may_be_away: bool = False) -> Store:
        """:meth:`open` the configured database. Raises StoreError."""
        return cls.open(
            config.database_url_in(data_dir),
            sqlite_synchronous=config.sqlite_synchronous,
            may_be_away=may_be_away,
        )

    @property
    def is_current(self) -> bool:
        """Whether the database has answered and its schema is this program's."""
        return self._is_current

    def close(self) -> None:
        """Close all connections. The store cannot be used afterwards."""
        self._engine.dispose()

    @contextmanager
    def reading(self) -> Iterator[Connection]:
        """A transaction that sees one state of the database throughout. Raises StoreError."""
        self.bring_up_to_date()
        with self._reading() as connection:
            yield connection

    @contextmanager
    def reading_within(self, timeout_s: float) -> Iterator[Connection]:
        """As :meth:`reading`, with a bound on its time. Raises QueryTimeoutError, StoreError."""
        deadline = time.monotonic() + timeout_s
        self.bring_up_to_date()
        try:
            with self._reading() as connection, self._dialect.time_limit(connection, timeout_s):
                yield connection
        except StoreError as error:
            if time.monotonic() < deadline:
                raise
            raise QueryTimeoutError(f"the question took longer than {timeout_s:g} s") from error

    @contextmanager
    def _reading(self) -> Iterator[Connection]:
        with self._explained(), self._engine.connect() as connection, connection.begin():
            yield connection

    @contextmanager
    def writing(self) -> Iterator[Connection]:
        """A transaction that may write; commits at the end of the block, or not at all. Raises StoreError."""
        self.bring_up_to_date()
        with self._writing() as connection:
            yield connection

    def lock_name(self, connection: Connection, name: str) -> None:
        """Let one writing transaction of this name after the other look and then write."""
        self._dialect.lock_name(connection, name)

    @contextmanager
    def _writing(self) -> Iterator[Connection]:
        with self._explained(), self._writing_engine.begin() as connection:
            yield connection

    def post(self, records: Sequence[UsageRecord], rate_book: RateBook) -> PostResult:
        """Price and write the records, each with its transaction and entries, in one database transaction.

        Idempotent: a request id that is already there is left exactly as it is. A record without a rate card
        is written with a charge of nothing and counted, since it must not be lost nor hold up the others.

        Raises:
            StoreError: the database does not answer, and nothing was written.
        """
        if not records:
            return PostResult(0, 0, 0)
        with self.writing() as connection:
            return self.post_within(connection, records, rate_book)

    def post_within(
        self, connection: Connection, records: Sequence[UsageRecord], rate_book: RateBook
    ) -> PostResult:
        """:meth:`post` in a transaction of :meth:`writing` that holds what must stand or fall with it."""
        if not records:
            return PostResult(0, 0, 0)
        in_order = sorted(
            records, key=_request_id
        )  # the same order everywhere, so that writers cannot deadlock
        charges = [_charge(record, rate_book) for record in in_order]
        posted_at_us = self._clock()
        usage_rows: list[Row] = [msgspec.structs.astuple(record) for record in in_order]
        transaction_rows: list[Row] = []
        entry_rows: list[Row] = []
        for record, charge in zip(in_order, charges, strict=True):
            _append_ledger_rows(record, charge, posted_at_us, transaction_rows, entry_rows)
        new_ids = self._usage_insert.execute_new(connection, usage_rows)
        self._transaction_insert.execute(connection, transaction_rows)
        self._entry_insert.execute(connection, entry_rows)
        self._rollups.add(connection, _rolled_up(in_order, charges, new_ids))
        return PostResult(
            len(new_ids),
            len(records) - len(new_ids),
            sum(charge is UNPRICED for charge in charges),
        )

    def has_record(self, request_ids: Collection[str]) -> set[str]:
        """Those of ``request_ids`` that have been posted."""
        column = schema.usage_records.c.request_id
        wanted = list(request_ids)
        found: set[str] = set()
        with self.reading() as connection:
            for start in range(0, len(wanted), _MAX_IDS_PER_QUERY):
                some = wanted[start : start + _MAX_IDS_PER_QUERY]
                found.update(connection.scalars(select(column).where(column.in_(some))))
        return found

    def bring_up_to_date(self) -> None:
        """Migrate the schema where that is needed; free once it is current. Raises StoreError."""
        if self._is_current:
            return
        with self._schema_lock:
            if not self._is_current:
                self._migrate()
                self._is_current = True

    def _migrate(self) -> None:
        with self._reading() as connection:
            if _revision(connection) == schema.HEAD_REVISION:
                return
        from billing.migrate import known_revisions, upgrade  # slow to import and seldom needed

        with self._writing() as connection:
            self._dialect.lock_schema(connection)
            revision = _revision(connection)
            if revision is not None and revision not in known_revisions():
                raise StoreError(
                    f"the database {_shown(str(self._engine.url))} was written by a newer version "
                    f"(its schema is {revision}); install that version"
                )
            logging.getLogger(__name__).info("migrating the database to schema %s", schema.HEAD_REVISION)
            upgrade(connection)
            if not are_complete(connection):
                self._rollups.rebuild(connection)

    def rebuild_rollups(self) -> int:
        """Count every record again into the sums that reports read; returns how many. Raises StoreError."""
        with self.writing() as connection:
            return self._rollups.rebuild(connection)

    @contextmanager
    def _explained(self) -> Iterator[None]:
        """Turn the driver's many ways of saying that the database is away into one."""
        try:
            yield
        except (IntegrityError, ProgrammingError):
            raise  # a fault in this program, not of the database
        except (DBAPIError, PoolTimeoutError) as error:
            cause = error.orig if isinstance(error, DBAPIError) else error
            is_away = isinstance(error, OperationalError | InterfaceError | PoolTimeoutError)
            kind = StoreAwayError if is_away else StoreError
            raise kind(f"the database {_shown(str(self._engine.url))} failed: {cause}") from error


def _skipping_insert(engine: Engine, dialect: Dialect, table: Table) -> BulkInsert:
    return BulkInsert(engine, table, dialect.insert_or_skip)


def _rolled_up(
    records: Sequence[UsageRecord], charges: Sequence[Charge], new_ids: Collection[str]
) -> RollupBatch:
    """What the records that are new add to the sums; of several with one id the first was written."""
    batch = RollupBatch()
    waiting = set(new_ids)
    for record, charge in zip(records, charges, strict=True):
        if record.request_id in waiting:
            waiting.remove(record.request_id)
            batch.add(record, amounts_of(charge))
    return batch


def _request_id(record: UsageRecord) -> str:
    return record.request_id


def _charge(record: UsageRecord, rate_book: RateBook) -> Charge:
    try:
        return rate_book.price(record)
    except NoRateError:
        return UNPRICED


def _append_ledger_rows(
    record: UsageRecord,
    charge: Charge,
    posted_at_us: int,
    transaction_rows: list[Row],
    entry_rows: list[Row],
) -> None:
    """Rows in the order of the tables' columns."""
    transaction = charge_transaction(record, charge)
    lines = charge.lines
    transaction_rows.append(
        (
            transaction.id,
            transaction.kind,
            transaction.occurred_at_us,
            posted_at_us,
            lines[0].amount_nanos if lines else 0,
            lines[1].amount_nanos if lines else 0,
            lines[2].amount_nanos if lines else 0,
            charge.amount_nanos,
            charge.undiscounted_nanos,
            charge.neurons_e4,
            charge.rate_card_version,
            charge.free_nanos,
        )
    )
    for leg, entry in enumerate(transaction.entries):
        entry_rows.append((transaction.id, leg, entry.ledger_account, entry.amount_nanos))


def _revision(connection: Connection) -> str | None:
    """The schema's revision; None for an empty database."""
    if not inspect(connection).has_table("alembic_version"):
        return None
    revision: str | None = connection.scalar(text("SELECT version_num FROM alembic_version"))
    return revision


def _shown(url: str) -> str:
    """The URL without its password."""
    try:
        return make_url(url).render_as_string(hide_password=True)
    except ArgumentError:
        return "URL"
