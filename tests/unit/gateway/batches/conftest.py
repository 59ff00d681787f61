"""A store in a directory of the test's own, and what works on it."""

from __future__ import annotations

import shutil
from collections.abc import Iterator
from pathlib import Path

import pytest

from billing.store import Store
from gateway.batches.config import BatchesConfig
from tests.support.batches import Clock, Office
from tests.support.ledger import open_store


@pytest.fixture(scope="session")
def empty_ledger(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Migrations take a while: once is enough."""
    directory = tmp_path_factory.mktemp("batches")
    with open_store(directory):
        pass
    return directory / "ledger.db"


@pytest.fixture
def config() -> BatchesConfig:
    return BatchesConfig(max_open_batches=5, max_open_items=70, max_failures=3, max_stored_bytes=1_000)


@pytest.fixture
def office(empty_ledger: Path, tmp_path: Path, config: BatchesConfig) -> Iterator[Office]:
    shutil.copy(empty_ledger, tmp_path / "ledger.db")
    clock = Clock()
    store = Store.open(f"sqlite:///{tmp_path / 'ledger.db'}", clock=clock)
    yield Office.on(store, config, clock)
    store.close()
