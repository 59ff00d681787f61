from __future__ import annotations

import shutil
from collections.abc import Iterator
from pathlib import Path

import pytest

from billing.rates import RateBook
from billing.store import Store
from tests.support.ledger import book, open_store


@pytest.fixture(scope="session")
def migrated(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A database file with the schema and the accounts, to copy."""
    directory = tmp_path_factory.mktemp("migrated")
    with open_store(directory):
        pass
    return directory / "ledger.db"


@pytest.fixture
def store(tmp_path: Path, migrated: Path) -> Iterator[Store]:
    shutil.copy(migrated, tmp_path)
    with open_store(tmp_path) as opened:
        yield opened


@pytest.fixture
def rate_book() -> RateBook:
    return book()
