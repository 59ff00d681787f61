"""Databases for tests: SQLite for all, PostgreSQL too for those that are marked ``each_store``; and how tests
are shared out where pytest-xdist runs several at once.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from typing import Any

import pytest
from hypothesis import HealthCheck, settings

from tests.support.databases import STORES, Databases, PostgresDatabases, SqliteDatabases
from tests.support.postgres import PostgresMissingError, PostgresServer

# How fast examples are made is the machine's affair, which is busy with other tests.
settings.register_profile("side by side", suppress_health_check=[HealthCheck.too_slow])
settings.load_profile("side by side")


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_make_scheduler(config: pytest.Config, log: Any) -> Any:
    """With ``--dist loadfile``."""
    if config.getoption("dist") != "loadfile":
        return None
    from tests.support.distribution import FilesStayTogether

    config.option.loadscopereorder = False  # the order is that of the items below
    return FilesStayTogether(config, log)


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    if "PYTEST_XDIST_WORKER" in os.environ:
        from tests.support.distribution import longest_first

        items[:] = longest_first(items)


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    if "databases" in metafunc.fixturenames and metafunc.definition.get_closest_marker("each_store"):
        metafunc.parametrize("databases", STORES, indirect=True, scope="session")


@pytest.fixture(scope="session")
def sqlite_databases(tmp_path_factory: pytest.TempPathFactory) -> SqliteDatabases:
    return SqliteDatabases(tmp_path_factory.mktemp("originals"))


@pytest.fixture(scope="session")
def postgres_server() -> Iterator[PostgresServer]:
    """Started when the first test wants it. Without the programs such tests are skipped, or fail where
    EMBERGATE_REQUIRE_POSTGRES is set.
    """
    try:
        server = PostgresServer()
    except PostgresMissingError as error:
        if os.environ.get("EMBERGATE_REQUIRE_POSTGRES"):
            raise
        pytest.skip(str(error))
    try:
        server.start()
        yield server
    finally:
        server.remove()


@pytest.fixture(scope="session")
def postgres_databases(postgres_server: PostgresServer) -> PostgresDatabases:
    return PostgresDatabases(postgres_server)


@pytest.fixture(scope="session")
def databases(request: pytest.FixtureRequest) -> Databases:
    """Where a test's databases come from."""
    kind = getattr(request, "param", "sqlite")
    found: Databases = request.getfixturevalue(f"{kind}_databases")
    return found
