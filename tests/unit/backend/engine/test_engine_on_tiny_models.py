"""The engine with the real runner on tiny random checkpoints: a sequence's greedy tokens are its own."""

from __future__ import annotations

import itertools
import random
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from backend.config import BackendConfig, CacheConfig, DeviceConfig, ModelSource, SchedulerConfig
from backend.engine.engine import Engine
from backend.engine.messages import EngineStats, SamplingParams, SequenceRequest
from backend.engine.runner import ModelRunner
from tests.support.tiny_models import write_tiny_kimi, write_tiny_llama

NUM_PROMPTS = 6
MAX_TOKENS = 40


@pytest.fixture(scope="module", params=["llama", "kimi"])
def checkpoint(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    directory = tmp_path_factory.mktemp(request.param)
    write: dict[str, Callable[[Path], object]] = {"llama": write_tiny_llama, "kimi": write_tiny_kimi}
    write[request.param](directory)
    return directory


def engine_on(checkpoint: Path, *, num_blocks: int = 64, max_tokens_per_step: int = 512) -> Engine:
    config = BackendConfig(
        replica_id="r0",
        model=ModelSource(path=str(checkpoint), served_as="tiny", max_model_len=192),
        cache=CacheConfig(num_blocks=num_blocks),
        scheduler=SchedulerConfig(max_tokens_per_step=max_tokens_per_step, max_running=NUM_PROMPTS),
        device=DeviceConfig(device="cpu", dtype="float32", threads=1),
    )
    return Engine(
        ModelRunner.load(config), config, clock_s=time.monotonic, draw_seed=itertools.count().__next__
    )


def prompts() -> list[list[int]]:
    rng = random.Random(11)
    stem = [rng.randrange(3, 256) for _ in range(50)]
    lengths = [17 + 13 * index for index in range(NUM_PROMPTS)]
    return [
        stem[: 10 * index] + [rng.randrange(3, 256) for _ in range(length)]
        for index, length in enumerate(lengths)
    ]


def generate(engine: Engine, *prompts: list[int], temperature: float = 0.0) -> list[list[int]]:
    """All prompts at once; the generated tokens of each."""
    answers: list[list[int]] = [[] for _ in prompts]
    for index, prompt in enumerate(prompts):
        sampling = SamplingParams(max_tokens=MAX_TOKENS, temperature=temperature, seed=index, ignore_eos=True)
        engine.submit(SequenceRequest(sequence_id=index, prompt_token_ids=prompt, sampling=sampling))
    while engine.has_work:
        engine.step()
        for output in engine.take_outputs():
            assert output.finish_reason in (None, "length"), output.message
            answers[output.sequence_id] += output.token_ids
    engine.check_invariants()
    return answers


def stats_after(engine: Engine, *prompts: list[int]) -> tuple[list[list[int]], EngineStats]:
    return generate(engine, *prompts), engine.stats()


def test_greedy_tokens_are_the_same_cold_warm_chunked_preempted_and_batched(checkpoint: Path) -> None:
    alone = engine_on(checkpoint)
    cold = [generate(alone, prompt)[0] for prompt in prompts()]
    assert all(len(set(answer)) > 1 for answer in cold), "a model that repeats itself shows nothing"

    warm = [generate(alone, prompt)[0] for prompt in prompts()]
    assert alone.stats().cached_prompt_tokens > 0
    assert warm == cold

    assert generate(engine_on(checkpoint), *prompts()) == cold

    chunked = engine_on(checkpoint, max_tokens_per_step=11)
    assert generate(chunked, *prompts()) == cold

    tight = engine_on(checkpoint, num_blocks=14)
    answers, stats = stats_after(tight, *prompts())
    assert stats.num_preemptions > 0
    assert answers == cold


def test_a_seed_gives_the_same_tokens_alone_and_in_a_batch(checkpoint: Path) -> None:
    together = generate(engine_on(checkpoint), *prompts(), temperature=0.7)
    again = generate(engine_on(checkpoint, num_blocks=14), *prompts(), temperature=0.7)
    assert together == again
    assert generate(engine_on(checkpoint), prompts()[0], temperature=0.7) == together[:1]
