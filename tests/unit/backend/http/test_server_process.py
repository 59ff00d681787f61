"""A replica as a process, with the real model: it drains on SIGTERM and says so when its engine is lost."""

from __future__ import annotations

import asyncio
import json
import os
import signal
import sys
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import aiohttp
import msgspec
import psutil
import pytest

from backend.config import BackendConfig, CacheConfig, DeviceConfig, ModelSource
from backend.wire import ReplicaStats
from tests.support.installation import prepared_models
from tests.support.ports import free_port

pytestmark = [pytest.mark.e2e, pytest.mark.model, pytest.mark.slow]


POLL_S = 0.03


class Process:
    """A running ``python -m backend`` that is ready."""

    def __init__(self, process: asyncio.subprocess.Process, session: aiohttp.ClientSession) -> None:
        self.process = process
        self.session = session

    def request(self, **fields: Any) -> dict[str, Any]:
        messages = [{"role": "user", "content": "Tell me a long story about a river."}]
        return {"request_id": "r", "model": "m", "messages": messages, "temperature": 0, **fields}

    async def stats(self) -> ReplicaStats:
        async with self.session.get("/stats") as response:
            return msgspec.json.decode(await response.read(), type=ReplicaStats)

    async def frames(self, body: dict[str, Any], began: asyncio.Event) -> list[bytes]:
        """Read a stream to its end, whatever that is; ``began`` is set after five frames."""
        frames: list[bytes] = []
        async with self.session.post("/v1/chat/completions", json=body) as response:
            assert response.status == 200
            async for line in response.content:
                if line.startswith(b"data: "):
                    frames.append(line.removeprefix(b"data: ").strip())
                if len(frames) == 5:
                    began.set()
        return frames


@asynccontextmanager
async def start(*, max_model_len: int = 2048, num_blocks: int = 200) -> AsyncIterator[Process]:
    path = prepared_models() / "smollm2-135m-instruct" / "llama"
    config = BackendConfig(
        replica_id="replica-0",
        model=ModelSource(path=str(path), served_as="m", max_model_len=max_model_len),
        port=free_port(),
        cache=CacheConfig(num_blocks=num_blocks),
        device=DeviceConfig(threads=1),
    )
    process = await asyncio.create_subprocess_exec(
        sys.executable, "-m", "backend", stdin=asyncio.subprocess.PIPE, stderr=asyncio.subprocess.DEVNULL
    )
    assert process.stdin is not None
    process.stdin.write(msgspec.json.encode(config))
    process.stdin.close()
    try:
        async with aiohttp.ClientSession(f"http://127.0.0.1:{config.port}") as session:
            async with asyncio.timeout(60):
                while not await _is_ready(session):  # noqa: ASYNC110 (state of another process)
                    await asyncio.sleep(0.1)
            yield Process(process, session)
    finally:
        if process.returncode is None:
            process.kill()
        await process.wait()


async def _is_ready(session: aiohttp.ClientSession) -> bool:
    try:
        async with session.get("/health") as response:
            return response.status == 200
    except aiohttp.ClientError:
        return False


async def test_a_stream_in_progress_is_finished_after_sigterm() -> None:
    async with start() as replica:
        began = asyncio.Event()
        body = replica.request(stream=True, max_tokens=60, ignore_eos=True)
        running = asyncio.create_task(replica.frames(body, began))
        await began.wait()
        replica.process.send_signal(signal.SIGTERM)
        frames = await running
        assert frames[-1] == b"[DONE]"
        assert json.loads(frames[-2])["usage"]["completion_tokens"] == 60
        assert await replica.process.wait() == 0


async def test_a_lost_engine_is_an_error_frame_and_an_exit_code() -> None:
    async with start() as replica:
        began = asyncio.Event()
        body = replica.request(stream=True, max_tokens=500, ignore_eos=True)
        running = asyncio.create_task(replica.frames(body, began))
        await began.wait()
        (engine,) = psutil.Process(replica.process.pid).children()
        os.kill(engine.pid, signal.SIGKILL)
        frames = await running
        assert json.loads(frames[-1])["error"]["code"] == "engine_died"
        assert b"[DONE]" not in frames
        assert await replica.process.wait() == 1


async def test_a_reader_that_leaves_during_a_long_prompt_frees_its_blocks_at_once() -> None:
    async with start(max_model_len=8192, num_blocks=600) as replica:
        prompt = {"role": "user", "content": "river " * 4000}
        body = replica.request(stream=True, max_tokens=50) | {"messages": [prompt]}
        reading = asyncio.create_task(replica.frames(body, asyncio.Event()))
        await asyncio.sleep(1.0)
        stats = await replica.stats()
        while stats.num_running == 0:
            await asyncio.sleep(POLL_S)
            stats = await replica.stats()
        assert stats.num_free_blocks + stats.num_cached_blocks <= 600 - 4000 // 16
        assert not reading.done()

        reading.cancel()
        left_at = time.monotonic()
        while stats.num_running or stats.num_free_blocks + stats.num_cached_blocks < 600:
            assert time.monotonic() - left_at < 0.2 + 2 * POLL_S, stats
            await asyncio.sleep(POLL_S)
            stats = await replica.stats()
        assert stats.num_aborts == 1


async def test_the_engine_ends_with_its_replica() -> None:
    async with start() as replica:
        (engine,) = psutil.Process(replica.process.pid).children()
        replica.process.kill()
        await replica.process.wait()
        gone, alive = await asyncio.to_thread(psutil.wait_procs, [engine], 10)
        assert (len(gone), len(alive)) == (1, 0)


async def test_a_missing_model_is_one_sentence_and_an_exit_code() -> None:
    config = BackendConfig(
        replica_id="replica-0", model=ModelSource(path="/no/such/model", served_as="m"), port=free_port()
    )
    process = await asyncio.create_subprocess_exec(
        sys.executable, "-m", "backend", stdin=asyncio.subprocess.PIPE, stderr=asyncio.subprocess.PIPE
    )
    _, errors = await process.communicate(msgspec.json.encode(config))
    assert process.returncode == 1
    last = errors.decode().strip().splitlines()[-1]
    assert last.startswith("replica replica-0: ")
    assert "/no/such/model" in last
