"""One running installation for all judges; each judge in an environment of its own."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.support.client_packages import ClientPackages
from tests.support.installation import Installation

HERE = Path(__file__).parent


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Everything here needs packages of registries, and no other marker may be what selects it."""
    for item in items:
        if HERE in item.path.parents:
            item.add_marker("clients")


@pytest.fixture(scope="session")
def judges() -> ClientPackages:
    return ClientPackages(HERE)


@pytest.fixture(scope="session")
def installation(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Installation]:
    """Started once, stopped at the end; nothing of it may be left then."""
    installation = Installation(tmp_path_factory.mktemp("judges"))
    try:
        installation.up()
        yield installation
    finally:
        installation.down()
    assert installation.own_processes() == []
