"""Databases for tests, of either store; migrated once, and never seen with another test's rows."""

from __future__ import annotations

import itertools
import shutil
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from pathlib import Path

import psycopg
import pytest

from tests.support.postgres import PostgresServer

STORES = ("sqlite", pytest.param("postgres", marks=pytest.mark.postgres))
"""Parameters of the fixture ``databases`` for tests that run on both."""

Prepare = Callable[[str], None]
"""Migrates the database of a URL and puts in what every test wants to find."""

NewDatabase = Callable[[Path], AbstractContextManager[str]]
"""Lends a database to a test with this directory, by its URL."""


class SqliteDatabases:
    """Files in the directories of tests."""

    def __init__(self, home: Path) -> None:
        self._home = home

    def copies_of(self, name: str, prepare: Prepare) -> NewDatabase:
        """Lends copies of what ``prepare`` prepares, the first time that one is wanted."""
        original = self._home / f"{name}.db"

        @contextmanager
        def copy(directory: Path) -> Iterator[str]:
            if not original.exists():
                original.touch(0o600)
                prepare(f"sqlite:///{original}")
            directory.mkdir(parents=True, exist_ok=True)
            shutil.copy(original, directory / "ledger.db")
            yield f"sqlite:///{directory / 'ledger.db'}"

        return copy


class PostgresDatabases:
    """Databases of one server. A copy takes a while, so what a test left alone the next one has again."""

    def __init__(self, server: PostgresServer) -> None:
        self._server = server
        self._idle: dict[str, list[str]] = {}
        self._schemas: dict[str, str] = {}
        self._numbers = itertools.count(1)

    def copies_of(self, name: str, prepare: Prepare) -> NewDatabase:
        """As :meth:`SqliteDatabases.copies_of`."""

        @contextmanager
        def copy(directory: Path) -> Iterator[str]:
            if name not in self._schemas:
                prepare(self._server.create(name))
                with self._session(name) as session:
                    session.execute(_REMEMBER)
                    self._schemas[name] = _schema_of(session)
            idle = self._idle.setdefault(name, [])
            if idle:
                database = idle.pop()
            else:
                database = f"test_{next(self._numbers)}"
                self._server.create(database, name)
            yield self._server.url(database)
            if self._reset(database, name):
                idle.append(database)
            else:
                self._server.drop(database)

        return copy

    def _reset(self, database: str, name: str) -> bool:
        """Put the rows back to what they were; false when the test has changed more than rows."""
        with self._session(database) as session:
            if _schema_of(session) != self._schemas[name]:
                return False
            session.execute(_RESET)
            return True

    def _session(self, database: str) -> psycopg.Connection:
        return psycopg.connect(self._server.url(database).replace("+psycopg", ""), autocommit=True)


Databases = SqliteDatabases | PostgresDatabases

_REMEMBER = """
DO $$ DECLARE t name; BEGIN
    CREATE SCHEMA original;
    FOR t IN SELECT tablename FROM pg_tables WHERE schemaname = 'public' LOOP
        EXECUTE format('CREATE TABLE original.%I AS TABLE public.%I', t, t);
    END LOOP;
END $$
"""
_RESET = """
DO $$ DECLARE t name; BEGIN
    SET LOCAL session_replication_role = replica;
    FOR t IN SELECT tablename FROM pg_tables WHERE schemaname = 'public' LOOP
        EXECUTE format('DELETE FROM public.%I', t);
        EXECUTE format('INSERT INTO public.%I SELECT * FROM original.%I', t, t);
    END LOOP;
END $$
"""
_SCHEMA = """
SELECT coalesce((SELECT string_agg(relname::text, ',' ORDER BY relname) FROM pg_class
                 WHERE relnamespace = 'public'::regnamespace), '')
    || coalesce((SELECT string_agg(tgname::text, ',' ORDER BY tgname) FROM pg_trigger), '')
"""


def _schema_of(session: psycopg.Connection) -> str:
    row = session.execute(_SCHEMA).fetchone()
    assert row is not None
    return str(row[0])
