from __future__ import annotations

import asyncio
import os
import signal
import sys
import time
from collections.abc import AsyncIterator

import psutil
import pytest

from backend.config import BackendConfig, CacheConfig, ModelSource, SchedulerConfig
from backend.engine import client as client_module
from backend.engine.client import (
    EngineClient,
    EngineDiedError,
    EngineStartError,
    SequenceRefusedError,
    SequenceStream,
)
from backend.engine.messages import SamplingParams, SequenceRequest, TokenOutput
from tests.support.fake_engine import POISON_TOKEN_ID, VOCAB_SIZE
from tests.support.fake_model import alone


def config_of(path: str, **fields: object) -> BackendConfig:
    return BackendConfig(
        replica_id="r0",
        pool_token="secret",
        model=ModelSource(path=path, served_as="fake", max_model_len=256),
        cache=CacheConfig(num_blocks=64),
        scheduler=SchedulerConfig(max_tokens_per_step=64, max_running=4, max_waiting=4),
        **fields,  # type: ignore[arg-type]
    )


class Started:
    """Starts scripted engines and closes them after the test."""

    def __init__(self) -> None:
        self._clients: list[EngineClient] = []

    async def __call__(self, path: str, worker_module: str = "tests.support.scripted_engine") -> EngineClient:
        client = await EngineClient.start(config_of(path), worker_module=worker_module)
        self._clients.append(client)
        return client

    async def close(self) -> None:
        for client in self._clients:
            await client.close()


@pytest.fixture
async def start() -> AsyncIterator[Started]:
    started = Started()
    yield started
    await started.close()


def submit(client: EngineClient, prompt: list[int], max_tokens: int = 8) -> SequenceStream:
    return client.submit(
        SequenceRequest(
            sequence_id=client.new_sequence_id(),
            prompt_token_ids=prompt,
            sampling=SamplingParams(max_tokens=max_tokens, temperature=0.0, ignore_eos=True),
        )
    )


async def read(stream: SequenceStream) -> list[int]:
    return [token_id async for output in stream for token_id in output.token_ids]


async def test_tokens_stream_and_counts_are_kept(start: Started) -> None:
    client = await start("echo")
    first, second = submit(client, [1, 2, 3]), submit(client, [4, 5])
    assert await asyncio.gather(read(first), read(second)) == [[1, 2, 3], [4, 5]]
    assert (first.num_generated_tokens, first.cached_prompt_tokens, first.finish_reason) == (3, 16, "length")
    assert first.is_over
    assert client.num_open == 0
    assert client.stats().num_requests == 2
    with pytest.raises(StopAsyncIteration):
        await anext(first)


async def test_a_slow_reader_gets_several_tokens_in_one_output(start: Started) -> None:
    client = await start("echo")
    stream = submit(client, list(range(30)))
    await read(submit(client, [1]))  # the engine answers in order: the first is over too
    assert stream.is_over
    outputs = [output async for output in stream]
    assert [output.token_ids for output in outputs] == [list(range(30))]
    assert outputs[0].finish_reason == "length"


async def test_more_than_the_engine_takes_is_refused_at_once(start: Started) -> None:
    client = await start("never")
    streams = [submit(client, [1]) for _ in range(3)]
    with pytest.raises(SequenceRefusedError) as refusal:
        submit(client, [1])
    assert refusal.value.code == "queue_full"
    for stream in streams:
        stream.abort()
    assert [await read(stream) for stream in streams] == [[], [], []]
    assert {stream.finish_reason for stream in streams} == {"abort"}
    submit(client, [1])


async def test_aborts_of_what_is_over_or_unknown_do_nothing(start: Started) -> None:
    client = await start("echo")
    stream = submit(client, [1])
    await read(stream)
    stream.abort()
    client.abort(12345)
    assert stream.finish_reason == "length"
    assert await read(submit(client, [2])) == [2]


async def test_an_engine_that_cannot_start_says_why() -> None:
    stages: list[str] = []
    with pytest.raises(EngineStartError, match="architecture Unheard is not supported"):
        await EngineClient.start(
            config_of("fail"),
            lambda progress: stages.append(progress.stage),
            worker_module="tests.support.scripted_engine",
        )
    assert stages == ["half way"]


async def test_an_engine_that_ends_before_it_is_ready_is_an_error() -> None:
    with pytest.raises(EngineStartError, match="exit code 3 before it was ready"):
        await EngineClient.start(config_of("exit"), worker_module="tests.support.scripted_engine")


async def test_a_start_has_a_time_limit() -> None:
    with pytest.raises(EngineStartError, match=r"not ready within 0\.5 s"):
        await EngineClient.start(
            config_of("hang", start_timeout_s=0.5), worker_module="tests.support.scripted_engine"
        )


async def test_a_cancelled_start_leaves_no_process() -> None:
    starting = asyncio.create_task(
        EngineClient.start(config_of("hang"), worker_module="tests.support.scripted_engine")
    )
    await asyncio.sleep(0.5)
    starting.cancel()
    with pytest.raises(asyncio.CancelledError):
        await starting


async def test_when_the_engine_dies_open_streams_end_with_an_error(start: Started) -> None:
    client = await start("die")
    stream = submit(client, [1, 2])
    assert (await anext(stream)).token_ids == [1]
    with pytest.raises(EngineDiedError):
        await anext(stream)
    death = await asyncio.wait_for(client.died, 10)
    assert death.exit_code == -signal.SIGKILL
    assert not client.is_alive
    with pytest.raises(EngineDiedError):
        submit(client, [1])
    client.abort(stream.sequence_id)


async def test_an_unreadable_frame_ends_the_engine(start: Started) -> None:
    client = await start("garbage")
    with pytest.raises(EngineDiedError, match="unreadable"):
        await read(submit(client, [1]))
    await asyncio.wait_for(client.died, 10)


async def test_an_engine_that_does_not_go_is_killed(start: Started, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(client_module, "STOP_GRACE_S", 0.2)
    client = await start("deaf")
    await client.close()
    assert (await client.died).exit_code == -signal.SIGKILL


async def test_close_can_be_called_twice(start: Started) -> None:
    client = await start("echo")
    await client.close()
    await client.close()
    assert (await client.died).exit_code == 0


def test_a_refusal_comes_out_of_the_stream() -> None:
    async def scenario() -> None:
        stream = SequenceStream(None, 1)  # type: ignore[arg-type]
        stream._push(TokenOutput(sequence_id=1, finish_reason="error", refusal="busy", message="no place"))
        with pytest.raises(SequenceRefusedError, match="no place") as refusal:
            await anext(stream)
        assert refusal.value.code == "busy"
        with pytest.raises(StopAsyncIteration):
            await anext(stream)

    asyncio.run(scenario())


@pytest.mark.slow
async def test_a_whole_engine_serves_idles_aborts_and_exits(start: Started) -> None:
    client = await start("slow poison", "tests.support.fake_engine")
    prompts = [[seed, *range(40)] for seed in range(6)]
    streams = [submit(client, prompt, max_tokens=10) for prompt in prompts]
    answers = await asyncio.gather(*(read(stream) for stream in streams))
    assert answers == [alone(prompt, 10, VOCAB_SIZE) for prompt in prompts]

    bad, good = submit(client, [POISON_TOKEN_ID]), submit(client, prompts[0], max_tokens=10)
    assert await read(bad) == []
    assert bad.finish_reason == "error"
    assert await read(good) == answers[0]
    assert good.cached_prompt_tokens == 32

    assert min([await time_of_an_abort(client, prompts[1]) for _ in range(3)]) < 0.2
    assert client.stats().num_running == 0

    os.kill(client._process.pid, signal.SIGINT)
    os.kill(client._process.pid, signal.SIGTERM)
    cpu_before_s = cpu_seconds(client._process.pid)
    await asyncio.sleep(2.5)
    assert cpu_seconds(client._process.pid) - cpu_before_s < 0.1, "an idle engine sleeps"
    assert await read(submit(client, prompts[2], max_tokens=10)) == answers[2]
    await client.close()
    assert (await client.died).exit_code == 0


async def time_of_an_abort(client: EngineClient, prompt: list[int]) -> float:
    endless = submit(client, prompt, max_tokens=200)
    await anext(endless)
    endless.abort()
    started_at_s = time.monotonic()
    await read(endless)
    assert endless.finish_reason == "abort"
    return time.monotonic() - started_at_s


@pytest.mark.slow
async def test_a_crash_of_the_loop_ends_the_process_without_content(
    start: Started, capfd: pytest.CaptureFixture[str]
) -> None:
    client = await start("crash", "tests.support.fake_engine")
    with pytest.raises(EngineDiedError):
        await read(submit(client, [1]))
    assert (await client.died).exit_code == 1
    log = capfd.readouterr().err
    assert "the engine loop failed: SystemError at " in log
    assert "the device is gone" not in log


STARTER = """
import asyncio
from backend.engine.client import EngineClient
from tests.unit.backend.engine.test_client import config_of, submit

async def main():
    client = await EngineClient.start(config_of("slow"), worker_module="tests.support.fake_engine")
    stream = submit(client, [1, 2, 3], max_tokens=200)
    await anext(stream)
    print(client._process.pid, flush=True)
    await asyncio.sleep(60)

asyncio.run(main())
"""


@pytest.mark.slow
async def test_an_engine_whose_parent_is_killed_exits() -> None:
    parent = await asyncio.create_subprocess_exec(
        sys.executable, "-c", STARTER, stdout=asyncio.subprocess.PIPE
    )
    assert parent.stdout is not None
    engine = psutil.Process(int(await parent.stdout.readline()))
    parent.kill()
    await parent.wait()
    gone, alive = await asyncio.to_thread(psutil.wait_procs, [engine], 10)
    assert (len(gone), len(alive)) == (1, 0)


def cpu_seconds(pid: int) -> float:
    times = psutil.Process(pid).cpu_times()
    return float(times.user + times.system)
