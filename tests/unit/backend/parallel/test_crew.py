"""Whole replicas that share the experts out say what one replica says, step together, and end together."""

from __future__ import annotations

import asyncio
import os
import signal
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from pathlib import Path

import msgspec
import psutil
import pytest

from backend.config import BackendConfig, ParallelConfig
from backend.engine.client import EngineClient, EngineDiedError, EngineStartError
from backend.engine.messages import SamplingParams, SequenceRequest
from tests.support.engine_driver import generate
from tests.support.installation import prepared_models
from tests.support.ports import free_port
from tests.support.ranks import config_of, one_rank
from tests.support.tiny_models import write_tiny_kimi

pytestmark = pytest.mark.slow
MAX_TOKENS = 16
PROMPTS = [[7, 8, 9, 10, 11], [*range(20, 90)], [30, 31], [*range(100, 140)]]


@pytest.fixture(scope="module")
def kimi(tmp_path_factory: pytest.TempPathFactory) -> Path:
    directory = tmp_path_factory.mktemp("kimi")
    write_tiny_kimi(directory)
    return directory


def member(checkpoint: Path, rank: int, world: int, port: int) -> BackendConfig:
    parallel = ParallelConfig(
        data=world, data_rank=rank, meeting=f"127.0.0.1:{port}", exchange_timeout_s=60.0
    )
    return msgspec.structs.replace(config_of(checkpoint, 1, 1), parallel=parallel, replica_id=f"r{rank}")


@asynccontextmanager
async def crew(checkpoint: Path, world: int) -> AsyncIterator[list[EngineClient]]:
    port = free_port()
    members = await asyncio.gather(
        *(EngineClient.start(member(checkpoint, rank, world, port)) for rank in range(world))
    )
    try:
        yield list(members)
    finally:
        await asyncio.gather(*(each.close() for each in members))


async def tokens_of(client: EngineClient, prompt: Sequence[int], max_tokens: int = MAX_TOKENS) -> list[int]:
    sampling = SamplingParams(max_tokens=max_tokens, temperature=0.0, ignore_eos=True)
    request = SequenceRequest(
        sequence_id=client.new_sequence_id(), prompt_token_ids=list(prompt), sampling=sampling
    )
    return [token async for output in client.submit(request) for token in output.token_ids]


@pytest.mark.parametrize("world", [2, 3])
async def test_members_say_what_one_replica_says(kimi: Path, world: int) -> None:
    wanted = generate(one_rank(kimi), PROMPTS, max_tokens=MAX_TOKENS)
    assert all(len(set(tokens)) > 1 for tokens in wanted), "a model that repeats itself shows nothing"
    async with crew(kimi, world) as members:
        # All at once, on members that begin and end at different times.
        asked = [(members[at % world], prompt) for at, prompt in enumerate(PROMPTS)]
        assert await asyncio.gather(*(tokens_of(*each) for each in asked)) == wanted
        # One member alone has work, then another; the rest takes part with nothing.
        for client in members:
            assert await tokens_of(client, PROMPTS[1]) == wanted[1]
        assert members[1].stats().cached_prompt_tokens > 0
        # Nobody steps while nobody has work.
        await asyncio.sleep(0.3)
        cpu_s = [cpu_of(client) for client in members]
        await asyncio.sleep(1.0)
        assert max(cpu_of(client) - before for client, before in zip(members, cpu_s, strict=True)) < 0.2


def cpu_of(client: EngineClient) -> float:
    times = psutil.Process(client._process.pid).cpu_times()
    return float(times.user + times.system)


async def test_waves_begin_and_end_at_any_moment(kimi: Path) -> None:
    (wanted,) = generate(one_rank(kimi), PROMPTS[:1], max_tokens=3)
    async with crew(kimi, 2) as members:

        async def keep_asking(client: EngineClient, pause_s: float) -> None:
            for _ in range(25):
                assert await tokens_of(client, PROMPTS[0], 3) == wanted
                await asyncio.sleep(pause_s)

        async with asyncio.timeout(60):
            await asyncio.gather(keep_asking(members[0], 0.003), keep_asking(members[1], 0.007))


@pytest.mark.model
async def test_the_embedded_model_says_the_same() -> None:
    checkpoint = prepared_models() / "smollm2-135m-instruct" / "kimi"
    asked = [[1, 4093, 198, 1780, 314, 260, 3575, 282, 4649, 47], [504, 3575, 282, 7042, 314]]
    wanted = generate(one_rank(checkpoint), asked, max_tokens=12)
    async with crew(checkpoint, 2) as members:
        assert await asyncio.gather(*map(tokens_of, members, asked, (12, 12))) == wanted


@pytest.mark.parametrize("lost", [0, 1])
@pytest.mark.parametrize("is_busy", [True, False], ids=["busy", "idle"])
async def test_the_crew_ends_with_any_member_and_a_new_one_serves(
    kimi: Path, lost: int, is_busy: bool
) -> None:
    async with crew(kimi, 2) as members:
        other = members[1 - lost]
        running = asyncio.create_task(tokens_of(other, PROMPTS[0], 150)) if is_busy else None
        if running is not None:
            while other.stats().num_running == 0:  # noqa: ASYNC110 - the engine's own figures set no event
                await asyncio.sleep(0.01)
        os.kill(members[lost]._process.pid, signal.SIGKILL)
        assert (await asyncio.wait_for(other.died, 30)).exit_code == 1
        if running is not None:
            with pytest.raises(EngineDiedError):
                await running
    if is_busy and lost:
        async with crew(kimi, 2) as members:
            assert len(await tokens_of(members[0], PROMPTS[0])) == MAX_TOKENS


async def test_a_member_without_others_says_whom_it_waited_for(kimi: Path) -> None:
    alone = msgspec.structs.replace(member(kimi, 1, 2, free_port()), start_timeout_s=30.0)
    with pytest.raises(EngineStartError, match=r"member 1 of 2 did not meet the others at 127\.0\.0\.1"):
        await EngineClient.start(alone)


async def test_settings_that_cannot_be_are_named(kimi: Path) -> None:
    config = member(kimi, 2, 2, 1)
    with pytest.raises(EngineStartError, match="there is no member 2 of 2"):
        await EngineClient.start(config)
    nowhere = msgspec.structs.replace(config.parallel, data_rank=0, meeting="somewhere")
    with pytest.raises(EngineStartError, match=r"parallel\.meeting: expected HOST:PORT"):
        await EngineClient.start(msgspec.structs.replace(config, parallel=nowhere))
