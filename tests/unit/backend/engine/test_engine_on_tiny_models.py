"""The engine with the real runner on tiny random checkpoints: a sequence's tokens are its own."""

from __future__ import annotations

import random
from collections.abc import Callable
from functools import partial
from pathlib import Path

import pytest

from tests.support.engine_driver import engine_on, generate
from tests.support.tiny_models import write_tiny_kimi, write_tiny_llama

NUM_PROMPTS = 6
MAX_TOKENS = 40
TIGHT_BLOCKS = 14

start = partial(engine_on, max_model_len=192)
answer = partial(generate, max_tokens=MAX_TOKENS)


@pytest.fixture(scope="module", params=["llama", "kimi"])
def checkpoint(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    directory = tmp_path_factory.mktemp(request.param)
    write: dict[str, Callable[[Path], object]] = {"llama": write_tiny_llama, "kimi": write_tiny_kimi}
    write[request.param](directory)
    return directory


def prompts() -> list[list[int]]:
    rng = random.Random(11)
    stem = [rng.randrange(3, 256) for _ in range(50)]
    return [
        stem[: 10 * index] + [rng.randrange(3, 256) for _ in range(17 + 13 * index)]
        for index in range(NUM_PROMPTS)
    ]


@pytest.mark.slow
def test_greedy_tokens_are_the_same_cold_warm_chunked_preempted_and_batched(checkpoint: Path) -> None:
    alone = start(checkpoint, num_blocks=64)
    cold = [answer(alone, [prompt])[0] for prompt in prompts()]
    assert all(len(set(tokens)) > 1 for tokens in cold), "a model that repeats itself shows nothing"

    assert [answer(alone, [prompt])[0] for prompt in prompts()] == cold, "warm"
    assert alone.stats().cached_prompt_tokens > 0

    assert answer(start(checkpoint, num_blocks=64), prompts()) == cold, "batched"

    assert answer(start(checkpoint, num_blocks=64, max_tokens_per_step=11), prompts()) == cold, "chunked"

    tight = start(checkpoint, num_blocks=TIGHT_BLOCKS)
    assert answer(tight, prompts()) == cold, "preempted"
    assert tight.stats().num_preemptions > 0


@pytest.mark.slow
def test_a_seed_gives_the_same_tokens_alone_in_a_batch_and_preempted(checkpoint: Path) -> None:
    together = answer(start(checkpoint, num_blocks=64), prompts(), temperature=0.7)
    tight = start(checkpoint, num_blocks=TIGHT_BLOCKS)
    assert answer(tight, prompts(), temperature=0.7) == together
    assert tight.stats().num_preemptions > 0
    assert answer(start(checkpoint, num_blocks=64), prompts()[:1], temperature=0.7) == together[:1]
