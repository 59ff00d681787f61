"""Two replicas, three, and two again under load: only sessions that must move do, with their cache."""

from __future__ import annotations

import asyncio
import os
import signal
import subprocess
import sys
from collections.abc import AsyncIterator
from dataclasses import dataclass, field
from pathlib import Path

import msgspec
import pytest

from backend.config import (
    BackendConfig,
    CacheConfig,
    DeviceConfig,
    ModelSource,
    RegistrationConfig,
    TransferConfig,
)
from billing.audit import audit
from billing.rates import RateBook
from gateway.config import RegistrationConfig as GatewayRegistration
from gateway.secret_files import POOL_TOKEN, load_or_create
from tests.support.gateway_harness import (
    BILLING,
    MODEL,
    Harness,
    gateway_config,
    open_books,
    prepare_data_dir,
)
from tests.support.installation import prepared_models
from tests.support.ports import free_port

pytestmark = [pytest.mark.e2e, pytest.mark.slow, pytest.mark.model]

NUM_SESSIONS = 12
BLOCK = 16
LINGER_S = 15.0
STEM = "You are a patient gardener who answers in short sentences. " * 4


@dataclass
class Session:
    """A conversation that grows; what its turns reported."""

    key: str
    messages: list[dict[str, str]] = field(default_factory=list)
    prompts: list[int] = field(default_factory=list)
    cached: list[int] = field(default_factory=list)

    async def turn(self, gateway: Harness) -> None:
        text = STEM if not self.messages else "And what else should I know?"
        self.messages.append({"role": "user", "content": f"{text} ({self.key})"})
        reply = await gateway.chat(
            messages=self.messages, max_tokens=6, headers={"x-session-affinity": self.key}
        )
        assert reply.status == 200, reply.body
        self.messages.append(reply.json["choices"][0]["message"] | {"refusal": None})
        usage = reply.json["usage"]
        self.prompts.append(usage["prompt_tokens"])
        self.cached.append(usage["prompt_tokens_details"]["cached_tokens"])

    @property
    def was_warm(self) -> bool:
        """Whether the last turn found what the one before had computed, but for a block at its end."""
        return self.cached[-1] >= self.prompts[-2] - BLOCK


def spawn(config: BackendConfig) -> subprocess.Popen[bytes]:
    process = subprocess.Popen([sys.executable, "-m", "backend"], stdin=subprocess.PIPE)
    assert process.stdin is not None
    process.stdin.write(msgspec.json.encode(config))
    process.stdin.close()
    return process


class Pool:
    """Replicas of the embedded model that announce themselves to one gateway."""

    def __init__(self, gateway: Harness, data_dir: Path) -> None:
        self.gateway = gateway
        self._token = load_or_create(data_dir / "secrets", POOL_TOKEN)
        self._processes: dict[str, subprocess.Popen[bytes]] = {}

    async def add(self, name: str) -> None:
        checkpoint = prepared_models() / "smollm2-135m-instruct" / "llama"
        config = BackendConfig(
            replica_id=name,
            model=ModelSource(path=str(checkpoint), served_as=MODEL, max_model_len=2048),
            port=free_port(),
            pool_token=self._token,
            cache=CacheConfig(block_size=BLOCK, num_blocks=1024),
            device=DeviceConfig(device="cpu", threads=1),
            transfer=TransferConfig(is_enabled=True, linger_s=LINGER_S),
            registration=RegistrationConfig(
                gateways=[self.gateway.root("")], weight=1.0, interval_s=0.2, lease_s=30.0
            ),
        )
        self._processes[name] = spawn(config)
        async with asyncio.timeout(120):
            while name not in self.ready:  # noqa: ASYNC110 - the state of other processes sets no event
                await asyncio.sleep(0.05)

    def drain(self, name: str) -> None:
        """Ask it to end as operators do."""
        os.kill(self._processes[name].pid, signal.SIGTERM)

    async def wait_gone(self, name: str) -> None:
        assert await asyncio.to_thread(self._processes[name].wait, 60) == 0
        del self._processes[name]
        assert name not in self.ready

    @property
    def ready(self) -> list[str]:
        assert self.gateway.gateway is not None
        return [each.id for each in self.gateway.gateway.table.replicas if each.health == "ready"]

    def close(self) -> None:
        for process in self._processes.values():
            process.kill()
        for process in self._processes.values():
            process.wait(60)


@pytest.fixture
async def pool(tmp_path: Path) -> AsyncIterator[Pool]:
    data_dir = tmp_path / "data"
    prepare_data_dir(data_dir)
    config = gateway_config(registration=GatewayRegistration(is_enabled=True))
    upstream = msgspec.structs.replace(config.upstream, first_byte_timeout_s=60.0, idle_timeout_s=30.0)
    gateway = Harness(data_dir, [], msgspec.structs.replace(config, upstream=upstream))
    await gateway.start()
    replicas = Pool(gateway, data_dir)
    yield replicas
    replicas.close()
    await gateway.stop()


def owners(pool: Pool, sessions: list[Session]) -> dict[str, str]:
    """Which replica served the last turn of each."""
    assert pool.gateway.gateway is not None
    predictions = pool.gateway.gateway._pipeline._predictions
    return {
        key: replica
        for (_, key), (replica, _) in predictions._last.items()
        if key in {s.key for s in sessions}
    }


async def all_turn(pool: Pool, sessions: list[Session]) -> dict[str, str]:
    limit = asyncio.Semaphore(4)

    async def one(session: Session) -> None:
        async with limit:
            await session.turn(pool.gateway)

    await asyncio.gather(*(one(session) for session in sessions))
    return owners(pool, sessions)


async def test_two_three_two(pool: Pool) -> None:
    sessions = [Session(f"session-{number}") for number in range(NUM_SESSIONS)]
    await asyncio.gather(pool.add("r0"), pool.add("r1"))
    await all_turn(pool, sessions)
    before = await all_turn(pool, sessions)
    assert set(before.values()) == {"r0", "r1"}
    assert all(session.was_warm for session in sessions)

    await pool.add("r2")
    grown = await all_turn(pool, sessions)
    moved = {key for key in before if grown[key] != before[key]}
    assert {grown[key] for key in moved} == {"r2"}, "only to the newcomer"
    assert 0 < len(moved) < NUM_SESSIONS / 2
    assert all(session.was_warm for session in sessions), "what moved was handed over"
    assert await all_turn(pool, sessions) == grown
    assert all(session.was_warm for session in sessions)

    running = asyncio.create_task(all_turn(pool, sessions))
    await asyncio.sleep(0.2)
    pool.drain("r2")
    await running
    shrunk = await all_turn(pool, sessions)
    assert shrunk == before, "back to where they were, and nobody else moved"
    assert all(session.was_warm for session in sessions)
    await pool.wait_gone("r2")

    await all_turn(pool, sessions)
    assert all(session.was_warm for session in sessions)
    await pool.gateway.stop()
    records = pool.gateway.records()
    assert len(records) == NUM_SESSIONS * 7
    assert {record.status for record in records} == {"ok"}
    assert sum(record.cached_prompt_tokens for record in records) == sum(
        sum(session.cached) for session in sessions
    )
    store = open_books(pool.gateway.data_dir)
    try:
        assert not audit(store, RateBook.from_config(BILLING)).findings
    finally:
        store.close()
