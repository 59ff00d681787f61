"""A store with two accounts; everything about money is tested on SQLite and on PostgreSQL."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from billing.rates import RateBook
from billing.store import Store
from tests.support.databases import STORES, Databases, NewDatabase
from tests.support.ledger import book, opened, prepare


@pytest.fixture(scope="session", params=STORES)
def databases(request: pytest.FixtureRequest) -> Databases:
    found: Databases = request.getfixturevalue(f"{request.param}_databases")
    return found


@pytest.fixture(scope="session")
def new_ledger(databases: Databases) -> NewDatabase:
    """Makes a ledger with the two accounts, given a directory of the test's own."""
    return databases.copies_of("ledger", prepare)


@pytest.fixture
def blank_url(databases: Databases, tmp_path: Path) -> Iterator[str]:
    """A database with nothing in it."""
    with databases.copies_of("blank", lambda url: None)(tmp_path / "blank") as url:
        yield url


@pytest.fixture
def ledger_url(new_ledger: NewDatabase, tmp_path: Path) -> Iterator[str]:
    """A ledger of the test's own."""
    with new_ledger(tmp_path) as url:
        yield url


@pytest.fixture
def store(ledger_url: str) -> Iterator[Store]:
    with opened(ledger_url) as store:
        yield store


@pytest.fixture
def rate_book() -> RateBook:
    return book()
