"""Several ranks say what one does, and the loss of one ends the engine with a word about it."""

from __future__ import annotations

import asyncio
import os
import random
import signal
from collections.abc import Callable
from pathlib import Path

import psutil
import pytest

from backend.engine.client import EngineClient, EngineDiedError, EngineStartError
from backend.engine.messages import SamplingParams, SequenceRequest
from embergate.layout import DataLayout
from tests.support.engine_driver import generate
from tests.support.ranks import config_of, one_rank, ranks
from tests.support.tiny_models import write_tiny_kimi, write_tiny_llama

pytestmark = pytest.mark.slow

WRITERS: dict[str, Callable[[Path], object]] = {"llama": write_tiny_llama, "kimi": write_tiny_kimi}
MAX_TOKENS = 16


@pytest.fixture(scope="module")
def kimi(tmp_path_factory: pytest.TempPathFactory) -> Path:
    directory = tmp_path_factory.mktemp("kimi")
    write_tiny_kimi(directory)
    return directory


def prompts() -> list[list[int]]:
    rng = random.Random(5)
    stem = [rng.randrange(3, 256) for _ in range(40)]
    return [stem[: 9 * at] + [rng.randrange(3, 256) for _ in range(7 + 11 * at)] for at in range(4)]


@pytest.mark.parametrize(
    ("family", "tensor", "expert"),
    [("llama", 2, 1), ("kimi", 2, 1), ("kimi", 1, 3), ("kimi", 2, 2)],
)
def test_tiny_models_say_the_same(family: str, tensor: int, expert: int, tmp_path: Path) -> None:
    WRITERS[family](tmp_path)
    wanted = generate(one_rank(tmp_path), prompts(), max_tokens=MAX_TOKENS)
    assert all(len(set(tokens)) > 1 for tokens in wanted), "a model that repeats itself shows nothing"
    with ranks(tmp_path, tensor, expert) as (engine, runner, followers):
        assert len(followers.pids) == tensor * expert - 1
        assert generate(engine, prompts(), max_tokens=MAX_TOKENS) == wanted
        assert generate(engine, prompts(), max_tokens=MAX_TOKENS) == wanted, "warm"
        assert engine.stats().cached_prompt_tokens > 0
        if expert > 1:
            assert len(runner.expert_loads) == expert
            assert min(runner.expert_loads) > 0, "every rank computes some"


@pytest.mark.model
@pytest.mark.parametrize(("form", "tensor", "expert"), [("llama", 2, 1), ("kimi", 2, 2)])
def test_the_embedded_model_says_the_same(form: str, tensor: int, expert: int) -> None:
    root = Path(os.environ.get("EMBERGATE_DATA_DIR", Path(__file__).parents[4] / ".embergate"))
    checkpoint = DataLayout(root.resolve()).embedded_checkpoint(form)
    assert checkpoint.is_dir(), "the embedded model is not prepared: run `make model`"
    asked = [[1, 4093, 198, 1780, 314, 260, 3575, 282, 4649, 47], [504, 3575, 282, 7042, 314]]
    wanted = generate(one_rank(checkpoint), asked, max_tokens=12)
    with ranks(checkpoint, tensor, expert) as (engine, _, _):
        assert generate(engine, asked, max_tokens=12) == wanted


async def test_a_lost_rank_ends_the_engine_and_a_new_one_serves(kimi: Path) -> None:
    config = config_of(kimi, 2, 1)
    client = await EngineClient.start(config)
    wanted = await tokens_of(client, MAX_TOKENS)
    stream = client.submit(request_of(client, 150))
    await anext(stream)
    children = psutil.Process(client._process.pid).children()
    follower = next(child for child in children if "backend.parallel.follower" in child.cmdline())
    os.kill(follower.pid, signal.SIGKILL)
    with pytest.raises(EngineDiedError):
        async for _ in stream:
            pass
    death = await asyncio.wait_for(client.died, 30)
    assert death.exit_code == 1
    await client.close()

    again = await EngineClient.start(config)
    assert await tokens_of(again, MAX_TOKENS) == wanted
    await again.close()


async def test_a_rank_that_is_lost_while_idle_is_noticed(kimi: Path) -> None:
    client = await EngineClient.start(config_of(kimi, 2, 1))
    (follower,) = psutil.Process(client._process.pid).children()
    os.kill(follower.pid, signal.SIGKILL)
    assert (await asyncio.wait_for(client.died, 30)).exit_code == 1
    await client.close()


async def test_ranks_end_with_their_engine(kimi: Path) -> None:
    client = await EngineClient.start(config_of(kimi, 2, 1))
    (follower,) = psutil.Process(client._process.pid).children()
    client._process.kill()
    await client.died
    await asyncio.to_thread(follower.wait, 30)
    await client.close()


async def test_a_model_that_cannot_be_shared_out_is_refused_by_name(kimi: Path) -> None:
    with pytest.raises(EngineStartError, match=r"parallel\.tensor: 5 ranks cannot share"):
        await EngineClient.start(config_of(kimi, 5, 1))


def request_of(client: EngineClient, max_tokens: int) -> SequenceRequest:
    sampling = SamplingParams(max_tokens=max_tokens, temperature=0.0, ignore_eos=True)
    return SequenceRequest(
        sequence_id=client.new_sequence_id(), prompt_token_ids=[7, 8, 9, 10, 11], sampling=sampling
    )


async def tokens_of(client: EngineClient, max_tokens: int) -> list[int]:
    stream = client.submit(request_of(client, max_tokens))
    return [token async for output in stream for token in output.token_ids]
