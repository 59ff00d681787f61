"""Two replicas with roles, each with an engine process of the fake model; ``kill -9`` of either engine."""

from __future__ import annotations

import asyncio
import json
import os
import signal
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack, asynccontextmanager
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import aiohttp
import pytest

from backend.config import BackendConfig, CacheConfig, ModelSource, Role, TransferConfig
from backend.engine.client import EngineClient
from backend.server import ReplicaServer
from gateway.config import UpstreamConfig
from tests.support.gateway_harness import Harness, gateway_config, prepare_data_dir
from tests.support.waiting import eventually
from tests.unit.backend.conftest import CHATML, make_definition

pytestmark = [pytest.mark.chaos, pytest.mark.slow]

NUM_BLOCKS = 256
LONG = "all work and no play makes a dull boy " * 40


class RunningReplica:
    """A server in this process, its engine process, and a client."""

    def __init__(self, server: ReplicaServer, session: aiohttp.ClientSession) -> None:
        self.server = server
        self.session = session

    @property
    def engine_pid(self) -> int:
        engine = self.server._engine
        assert isinstance(engine, EngineClient)
        return engine._process.pid

    async def get(self, path: str) -> Any:
        async with self.session.get(path) as response:
            return await response.json()

    async def ask(self, place: str = "", **fields: Any) -> tuple[int, Any]:
        """Status and body of a greedy answer whose prompt is computed at ``place``."""
        body = {
            "request_id": os.urandom(6).hex(),
            "model": "m",
            "messages": [{"role": "user", "content": LONG}],
            "max_tokens": 12,
            "temperature": 0,
            **fields,
        }
        headers = {"x-embergate-prefill": place} if place else {}
        async with self.session.post("/v1/chat/completions", json=body, headers=headers) as response:
            return response.status, await response.json()

    async def is_at_baseline(self) -> bool:
        stats = await self.get("/stats")
        unused = stats["num_free_blocks"] + stats["num_cached_blocks"]
        return bool(unused == NUM_BLOCKS and stats["num_running"] == stats["num_waiting"] == 0)


@asynccontextmanager
async def replica(home: Path, role: Role, *words: str) -> AsyncIterator[RunningReplica]:
    path = home / " ".join((role, *words))
    path.mkdir()
    (path / "tokenizer.json").write_text(json.dumps(make_definition()))
    (path / "chat_template.jinja").write_text(CHATML)
    config = BackendConfig(
        replica_id=role,
        model=ModelSource(path=str(path), served_as="m", max_model_len=2048),
        port=0,
        role=role,
        cache=CacheConfig(num_blocks=NUM_BLOCKS),
        transfer=TransferConfig(stall_timeout_s=2.0, lease_s=3.0, buffer_mib=1),
    )
    start = partial(EngineClient.start, worker_module="tests.support.fake_engine")
    server = ReplicaServer(config, start=start)
    await server.listen()
    async with aiohttp.ClientSession(f"http://127.0.0.1:{server.port}") as session:
        try:
            await server.load()
            yield RunningReplica(server, session)
        finally:
            await server.close()


async def baseline(*replicas: RunningReplica) -> None:
    for each in replicas:
        async with asyncio.timeout(10):
            while not await each.is_at_baseline():  # noqa: ASYNC110 - another process's state
                await asyncio.sleep(0.05)


def text_of(answer: Any) -> str:
    return str(answer["choices"][0]["message"]["content"])


async def test_answers_are_the_same_split_and_when_either_engine_is_killed(tmp_path: Path) -> None:
    async with AsyncExitStack() as stack:
        prefill, decode = await asyncio.gather(
            stack.enter_async_context(replica(tmp_path, "prefill", "slow")),
            stack.enter_async_context(replica(tmp_path, "decode", "slow")),
        )
        health = await prefill.get("/health")
        place = health["transfer"]
        assert (health["role"], health["can_fetch"]) == ("prefill", False)
        assert (await decode.get("/health"))["can_fetch"]

        _, alone = await decode.ask(cache_salt="alone")
        _, split = await decode.ask(place)
        assert text_of(split) == text_of(alone)
        counters = decode.server._transfers.counters  # type: ignore[union-attr]
        num_blocks = (split["usage"]["prompt_tokens"] - 1) // 16
        assert counters.num_blocks_in == num_blocks > 50
        assert counters.num_completed_in == 1
        assert split["usage"]["prompt_tokens_details"]["cached_tokens"] == 0
        await baseline(prefill, decode)

        running = asyncio.create_task(decode.ask(place, cache_salt="killed"))
        before = counters.num_blocks_in
        await eventually(lambda: counters.num_blocks_in > before, interval_s=0.001)
        os.kill(prefill.engine_pid, signal.SIGKILL)
        status, answer = await running
        assert (status, text_of(answer)) == (200, text_of(alone))
        assert counters.num_blocks_in < before + num_blocks
        await baseline(decode)

        running = asyncio.create_task(decode.ask(cache_salt="lost"))
        await asyncio.sleep(0.1)
        os.kill(decode.engine_pid, signal.SIGKILL)
        status, answer = await running
        assert status == 500, "one clear error"
        assert answer["error"]["code"] == "engine_died"


async def test_a_gateway_splits_long_prompts_and_bills_what_was_cached(tmp_path: Path) -> None:
    async with AsyncExitStack() as stack:
        prefill, decode = await asyncio.gather(
            stack.enter_async_context(replica(tmp_path, "prefill")),
            stack.enter_async_context(replica(tmp_path, "decode")),
        )
        addresses = [
            SimpleNamespace(id=name, url=f"http://127.0.0.1:{each.server.port}")
            for name, each in (("prefill", prefill), ("decode", decode))
        ]
        prepare_data_dir(tmp_path / "data")
        harness = Harness(
            tmp_path / "data",
            cast(Any, addresses),
            gateway_config(upstream=UpstreamConfig(first_byte_timeout_s=20.0, idle_timeout_s=10.0)),
        )
        await harness.start()
        stack.push_async_callback(harness.stop)
        counters = decode.server._transfers.counters  # type: ignore[union-attr]

        short = await harness.chat(max_tokens=4, temperature=0)
        assert short.status == 200, short.body
        assert (short.status, short.headers["x-embergate-replica"]) == (200, "decode")
        assert counters.num_started_in == 0

        messages = [{"role": "user", "content": LONG}]
        for is_again in (False, True):
            answer = await harness.chat(messages=messages, max_tokens=4, temperature=0)
            assert (answer.status, answer.headers["x-embergate-replica"]) == (200, "decode")
            usage = answer.json["usage"]
            num_blocks = (usage["prompt_tokens"] - 1) // 16
            assert counters.num_blocks_in == num_blocks
            assert usage["prompt_tokens_details"]["cached_tokens"] == (num_blocks * 16 if is_again else 0)
        assert not counters.failures
        await baseline(prefill, decode)
