"""One running installation and one set of installed clients for all tests of real clients."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.support.client_installation import ClientInstallation
from tests.support.client_packages import ClientPackages

HERE = Path(__file__).parent


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Everything here needs packages of registries, and no other marker may be what selects it."""
    for item in items:
        if HERE in item.path.parents:
            item.add_marker("clients")


@pytest.fixture(scope="session")
def packages() -> ClientPackages:
    return ClientPackages()


@pytest.fixture(scope="session")
def installation(
    tmp_path_factory: pytest.TempPathFactory, packages: ClientPackages
) -> Iterator[ClientInstallation]:
    """Started once, stopped at the end; nothing of it may be left then."""
    assert packages.npm.is_dir()  # installed before anything runs
    assert packages.python.is_file()
    installation = ClientInstallation(tmp_path_factory.mktemp("clients"))
    try:
        installation.up()
        yield installation
    finally:
        installation.down()
    assert installation.own_processes() == []
