"""The only place where one database differs from another.

Everything else speaks SQLAlchemy Core. A dialect says how to connect, how a transaction begins, how an insert
skips rows that exist, and which triggers keep a table append-only.
"""

from __future__ import annotations

import os
import time
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager
from functools import cache
from pathlib import Path
from typing import Any, Protocol

from sqlalchemy import Connection, Engine, Table, create_engine, event, make_url, text
from sqlalchemy.dialects import postgresql, sqlite
from sqlalchemy.sql.base import ReadOnlyColumnCollection
from sqlalchemy.sql.dml import Insert
from sqlalchemy.sql.elements import KeyedColumnElement

_BEGIN = "billing_begin"
_BUSY_TIMEOUT_S = 30.0
_STEPS_PER_LOOK = 20_000
"""Steps of SQLite's machine, some tenths of a millisecond, between two looks at the clock."""
_MIGRATION_LOCK = 0x656D_6265_7267
_PATIENCE = {
    "connect_timeout": 10,
    "keepalives_idle": 15,
    "keepalives_interval": 5,
    "keepalives_count": 3,
    "tcp_user_timeout": 30_000,
    "application_name": "embergate",
}
"""By itself libpq waits for a host that vanished until the kernel gives up, a quarter of an hour later. What
the URL says goes before."""
_MAX_IDLE_MS = 60_000
"""A process that was stopped in the middle of a transaction must not hold its locks against all others."""


class Dialect(Protocol):
    """What the store needs to know about its database."""

    def connect(self, url: str, sqlite_synchronous: str) -> Engine:
        """An engine for reading in snapshots. Statements take positional parameters."""

    def writing(self, engine: Engine) -> Engine:
        """The same engine for transactions that write."""

    def insert_or_skip(self, table: Table) -> Insert:
        """An insert that leaves rows alone whose key exists."""

    def insert_or_add(self, table: Table) -> Insert:
        """An insert that adds to the columns outside the key where a row of the key exists."""

    def lock_table(self, connection: Connection, table: Table) -> None:
        """Keep others from writing to ``table`` until the transaction ends; they may read it."""

    def lock_name(self, connection: Connection, name: str) -> None:
        """Wait until no other transaction holds this name, and hold it until this one ends."""

    def time_limit(self, connection: Connection, timeout_s: float) -> AbstractContextManager[None]:
        """Make the transaction's statements fail that run longer."""

    def append_only(self, table: str) -> list[str]:
        """DDL that makes updates and deletes of ``table`` fail."""

    def lock_schema(self, connection: Connection) -> None:
        """Let one process at a time change the schema, until the transaction ends."""


class SqliteDialect:
    """Write-ahead log; a commit is flushed to the disk unless configured otherwise."""

    def connect(self, url: str, sqlite_synchronous: str) -> Engine:
        path = make_url(url).database
        if path:
            _create_privately(Path(path))
        engine = create_engine(url, pool_size=8, max_overflow=8, connect_args={"timeout": _BUSY_TIMEOUT_S})

        @event.listens_for(engine, "connect")
        def _prepare(connection: Any, _record: object) -> None:
            connection.isolation_level = None  # the driver's own idea of transactions, off
            connection.execute("PRAGMA journal_mode = WAL")
            connection.execute(f"PRAGMA synchronous = {sqlite_synchronous}")
            connection.execute("PRAGMA foreign_keys = ON")

        @event.listens_for(engine, "begin")
        def _begin(connection: Connection) -> None:
            mode = connection.get_execution_options().get(_BEGIN, "DEFERRED")
            connection.exec_driver_sql(f"BEGIN {mode}")

        return engine

    def writing(self, engine: Engine) -> Engine:
        return engine.execution_options(**{_BEGIN: "IMMEDIATE"})

    def insert_or_skip(self, table: Table) -> Insert:
        return sqlite.insert(table).on_conflict_do_nothing()

    def insert_or_add(self, table: Table) -> Insert:
        insert = sqlite.insert(table)
        return insert.on_conflict_do_update(
            index_elements=list(table.primary_key), set_=_added(table, insert.excluded)
        )

    def lock_table(self, connection: Connection, table: Table) -> None:
        """A writing transaction holds the lock of the whole database already."""

    def lock_name(self, connection: Connection, name: str) -> None:
        """As above."""

    @contextmanager
    def time_limit(self, connection: Connection, timeout_s: float) -> Iterator[None]:
        deadline = time.monotonic() + timeout_s
        driver: Any = connection.connection.driver_connection
        driver.set_progress_handler(lambda: time.monotonic() > deadline, _STEPS_PER_LOOK)
        try:
            yield
        finally:
            driver.set_progress_handler(None, 0)

    def append_only(self, table: str) -> list[str]:
        return [
            f"CREATE TRIGGER {table}_no_{verb} BEFORE {verb} ON {table} "
            f"BEGIN SELECT RAISE(ABORT, '{table} is append-only'); END"
            for verb in ("update", "delete")
        ]

    def lock_schema(self, connection: Connection) -> None:
        """A writing transaction holds the lock already."""


class PostgresDialect:
    """Any PostgreSQL driver with positional parameters, such as psycopg."""

    def connect(self, url: str, sqlite_synchronous: str) -> Engine:
        given = make_url(url).query
        engine = create_engine(
            url,
            pool_size=8,
            max_overflow=8,
            pool_pre_ping=True,
            paramstyle="format",
            connect_args={name: value for name, value in _PATIENCE.items() if name not in given},
        )

        @event.listens_for(engine, "connect")
        def _prepare(connection: Any, _record: object) -> None:
            connection.execute(f"SET idle_in_transaction_session_timeout = {_MAX_IDLE_MS}")
            connection.commit()

        # An engine that derives from one with an isolation level cannot have another, so it is set by hand.
        @event.listens_for(engine, "begin")
        def _begin(connection: Connection) -> None:
            mode = connection.get_execution_options().get(_BEGIN, "REPEATABLE READ")
            connection.exec_driver_sql(f"SET TRANSACTION ISOLATION LEVEL {mode}")

        return engine

    def writing(self, engine: Engine) -> Engine:
        return engine.execution_options(**{_BEGIN: "READ COMMITTED"})

    def insert_or_skip(self, table: Table) -> Insert:
        return postgresql.insert(table).on_conflict_do_nothing()

    def insert_or_add(self, table: Table) -> Insert:
        insert = postgresql.insert(table)
        return insert.on_conflict_do_update(
            index_elements=list(table.primary_key), set_=_added(table, insert.excluded)
        )

    def lock_table(self, connection: Connection, table: Table) -> None:
        connection.execute(text(f"LOCK TABLE {table.name} IN EXCLUSIVE MODE"))

    def lock_name(self, connection: Connection, name: str) -> None:
        query = text("SELECT pg_advisory_xact_lock(hashtextextended(:name, 0))")
        connection.execute(query, {"name": name})

    @contextmanager
    def time_limit(self, connection: Connection, timeout_s: float) -> Iterator[None]:
        connection.execute(text(f"SET LOCAL statement_timeout = {int(timeout_s * 1000)}"))
        yield

    def append_only(self, table: str) -> list[str]:
        return [
            f"CREATE FUNCTION {table}_refuse() RETURNS trigger LANGUAGE plpgsql AS "
            f"$$ BEGIN RAISE EXCEPTION '{table} is append-only' "
            f"USING ERRCODE = 'integrity_constraint_violation'; END $$",
            f"CREATE TRIGGER {table}_no_change BEFORE UPDATE OR DELETE OR TRUNCATE ON {table} "
            f"FOR EACH STATEMENT EXECUTE FUNCTION {table}_refuse()",
        ]

    def lock_schema(self, connection: Connection) -> None:
        connection.execute(text("SELECT pg_advisory_xact_lock(:key)"), {"key": _MIGRATION_LOCK})


def _added(table: Table, offered: ReadOnlyColumnCollection[str, KeyedColumnElement[Any]]) -> dict[str, Any]:
    """What is there plus what is offered, for every column outside the key."""
    return {column.name: column + offered[column.name] for column in table.columns if not column.primary_key}


@cache
def dialect_named(name: str) -> Dialect:
    """The dialect of a URL's backend. Raises ValueError for databases that were never tried."""
    if name == "sqlite":
        return SqliteDialect()
    if name == "postgresql":
        return PostgresDialect()
    raise ValueError(f"database {name!r} is not supported; use sqlite or postgresql")


def _create_privately(path: Path) -> None:
    """The file holds who used what and token hashes: readable by its owner only."""
    if not path.exists():
        path.parent.mkdir(parents=True, exist_ok=True)
        os.close(os.open(path, os.O_CREAT | os.O_RDWR, 0o600))
