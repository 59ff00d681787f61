"""A gateway over sockets with two scripted replicas, for each test."""

from __future__ import annotations

from collections.abc import AsyncIterator, Awaitable, Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from gateway.config import GatewayConfig
from tests.support.databases import Databases
from tests.support.fake_replica import FakeReplica
from tests.support.gateway_harness import Harness, prepare_data_dir, prepare_database, use_database


@pytest.fixture
async def replicas() -> AsyncIterator[list[FakeReplica]]:
    replicas = [FakeReplica("replica-0"), FakeReplica("replica-1")]
    for replica in replicas:
        await replica.start()
    yield replicas
    for replica in replicas:
        await replica.stop()


@pytest.fixture(scope="session")
def prepared_dir(tmp_path_factory: pytest.TempPathFactory) -> Path:
    directory = tmp_path_factory.mktemp("gateway") / "data"
    prepare_data_dir(directory)
    return directory


@pytest.fixture
def data_dir(tmp_path: Path, databases: Databases) -> Iterator[Path]:
    """A data directory with the accounts of the harness; those of tests that are marked ``each_store`` are
    also tried with PostgreSQL.
    """
    directory = tmp_path / "data"
    with databases.copies_of("gateway", prepare_database)(directory) as url:
        directory.mkdir(exist_ok=True)
        if not url.startswith("sqlite"):
            use_database(directory, url)
        yield directory


@pytest.fixture
async def start_gateway(
    data_dir: Path, replicas: list[FakeReplica]
) -> AsyncIterator[Callable[..., Awaitable[Harness]]]:
    """Starts gateways with a configuration of the test's; they are stopped after it."""
    started: list[Harness] = []

    async def start(config: GatewayConfig | None = None, **options: Any) -> Harness:
        harness = Harness(data_dir, options.pop("replicas", replicas), config, **options)
        started.append(harness)
        await harness.start()
        return harness

    yield start
    for harness in started:
        await harness.stop()


@pytest.fixture
async def gateway(start_gateway: Callable[..., Awaitable[Harness]]) -> Harness:
    return await start_gateway()
