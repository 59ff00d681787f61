"""A replica that announces itself to a gateway over sockets, serves, and goes."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any

import pytest

from backend.config import BackendConfig, ModelSource, RegistrationConfig
from backend.registrar import Registrar
from gateway.config import RegistrationConfig as GatewayRegistration
from gateway.secret_files import POOL_TOKEN, load_or_create
from tests.support.fake_replica import FakeReplica
from tests.support.gateway_harness import MODEL, Harness, gateway_config
from tests.support.waiting import eventually

StartGateway = Callable[..., Awaitable[Harness]]


def registrar(gateway: Harness, replica: FakeReplica, data_dir: Path, **changes: Any) -> Registrar:
    own = RegistrationConfig(
        gateways=[gateway.root("")], url=replica.url, interval_s=0.1, lease_s=0.6, timeout_s=1.0
    )
    config = BackendConfig(
        replica_id=replica.id,
        model=ModelSource(path="", served_as=changes.pop("model", MODEL)),
        pool_token=changes.pop("token", "") or load_or_create(data_dir / "secrets", POOL_TOKEN),
        registration=own,
    )
    return Registrar(config, num_kv_tokens=123_456, port=1)


@pytest.fixture
async def gateway(start_gateway: StartGateway) -> Harness:
    config = gateway_config(registration=GatewayRegistration(is_enabled=True))
    return await start_gateway(config, replicas=[])


def ids(gateway: Harness) -> list[str]:
    assert gateway.gateway is not None
    return [replica.id for replica in gateway.gateway.table.replicas if replica.health == "ready"]


async def test_replicas_come_serve_and_go(
    gateway: Harness, replicas: list[FakeReplica], data_dir: Path
) -> None:
    assert (await gateway.chat()).status == 503
    assert (await gateway.get(gateway.root("/ready"), token=None)).status == 503
    announcing = [registrar(gateway, replica, data_dir) for replica in replicas]
    for each in announcing:
        each.start()
    await eventually(lambda: ids(gateway) == [replica.id for replica in replicas])
    assert (await gateway.get(gateway.root("/ready"), token=None)).status == 200
    keys = [{"x-session-affinity": f"session-{number}"} for number in range(24)]
    replies = await asyncio.gather(*(gateway.chat(headers=key) for key in keys))
    assert {reply.status for reply in replies} == {200}
    assert all(replica.requests for replica in replicas)
    metrics = (await gateway.get(gateway.root("/metrics"), token=None)).body.decode()
    assert 'smg_worker_health{worker="replica-1"} 1.0' in metrics
    assert gateway.gateway is not None
    assert {replica.weight for replica in gateway.gateway.table.replicas} == {1.2}

    await announcing[0].stop()
    assert ids(gateway) == ["replica-1"]
    replies = await asyncio.gather(*(gateway.chat(headers=key) for key in keys))
    assert {reply.status for reply in replies} == {200}
    await announcing[1].stop()
    assert (await gateway.chat()).status == 503
    await gateway.stop()
    assert len(gateway.records()) == 48


async def test_one_that_falls_silent_loses_its_lease(
    gateway: Harness, replicas: list[FakeReplica], data_dir: Path
) -> None:
    silent = registrar(gateway, replicas[0], data_dir)
    silent.start()
    await eventually(lambda: ids(gateway) == ["replica-0"])
    for task in silent._tasks:
        task.cancel()
    assert gateway.gateway is not None
    table = gateway.gateway.table
    await eventually(lambda: not table.replicas)
    await silent.stop()


@pytest.mark.parametrize(
    ("changes", "reason"),
    [
        ({"token": "another installation's"}, "pool_token"),
        ({"model": "@cf/unknown/model"}, "none of them is in this gateway's catalog"),
    ],
)
async def test_a_replica_that_is_not_taken_says_why_once(
    gateway: Harness,
    replicas: list[FakeReplica],
    data_dir: Path,
    changes: dict[str, str],
    reason: str,
    caplog: pytest.LogCaptureFixture,
) -> None:
    stranger = registrar(gateway, replicas[0], data_dir, **changes)
    stranger.start()
    await eventually(lambda: bool(caplog.records))
    await asyncio.sleep(0.3)
    await stranger.stop()
    reasons = [each.fields["reason"] for each in caplog.records if each.name == "backend.registrar"]  # type: ignore[attr-defined]
    assert len(reasons) == 1
    assert reason in reasons[0]
    assert ids(gateway) == []


async def test_a_gateway_that_is_away_is_told_when_it_is_back(
    start_gateway: StartGateway, replicas: list[FakeReplica], data_dir: Path
) -> None:
    config = gateway_config(registration=GatewayRegistration(is_enabled=True))
    gateway = await start_gateway(config, replicas=[])
    replica = registrar(gateway, replicas[0], data_dir)
    assert gateway.gateway is not None
    port = gateway.gateway.server.port
    await gateway.stop()
    replica.start()
    await asyncio.sleep(0.2)
    again = await start_gateway(
        gateway_config(registration=GatewayRegistration(is_enabled=True), port=port), replicas=[]
    )
    await eventually(lambda: ids(again) == ["replica-0"])
    await replica.stop()


async def test_it_is_off_unless_it_is_configured(
    start_gateway: StartGateway, replicas: list[FakeReplica], data_dir: Path
) -> None:
    gateway = await start_gateway(gateway_config(), replicas=[])
    reply = await gateway.post(gateway.root("/internal/replicas"), {})
    assert reply.status == 404


async def test_a_message_without_end_is_refused(gateway: Harness) -> None:
    reply = await gateway.post(gateway.root("/internal/replicas"), b"x" * 100_000)
    assert reply.status == 413
