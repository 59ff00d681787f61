from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from billing.rates import RateBook
from billing.store import Store
from tests.support.ledger import book, open_store


@pytest.fixture
def store(tmp_path: Path) -> Iterator[Store]:
    with open_store(tmp_path) as opened:
        yield opened


@pytest.fixture
def rate_book() -> RateBook:
    return book()
