"""The engine on the embedded model in both forms: greedy answers do not depend on how they are computed."""

from __future__ import annotations

import os
import time
from collections.abc import Sequence
from functools import partial
from pathlib import Path

import pytest
from tokenizers import Tokenizer

from backend.engine.block_tags import BlockTags
from backend.engine.step import ScheduledChunk
from embergate.layout import DataLayout
from tests.support.engine_driver import engine_on, generate

pytestmark = [pytest.mark.model, pytest.mark.slow]

MAX_TOKENS = 48
SYSTEM = "You are a helpful AI assistant named SmolLM, trained by Hugging Face"
QUESTIONS = (
    "What is the capital of France?",
    "Explain photosynthesis to a child.",
    "Write a Python function that reverses a string.",
    "Describe how a bicycle stays upright, and why it is easier when it is fast.",
)

start = partial(engine_on, max_model_len=192, threads=2)
answer = partial(generate, max_tokens=MAX_TOKENS)


def checkpoint_of(form: str) -> Path:
    root = Path(os.environ.get("EMBERGATE_DATA_DIR", Path(__file__).parents[4] / ".embergate"))
    directory = DataLayout(root.resolve()).embedded_checkpoint(form)
    assert directory.is_dir(), "the embedded model is not prepared: run `make model`"
    return directory


@pytest.mark.parametrize("form", ["llama", "kimi"])
def test_greedy_tokens_are_the_same_cold_warm_chunked_preempted_and_batched(form: str) -> None:
    checkpoint = checkpoint_of(form)
    tokenizer = Tokenizer.from_file(str(checkpoint / "tokenizer.json"))
    turns = "<|im_start|>system\n{}<|im_end|>\n<|im_start|>user\n{}<|im_end|>\n<|im_start|>assistant\n"
    prompts = [tokenizer.encode(turns.format(SYSTEM, question)).ids for question in QUESTIONS]

    alone = start(checkpoint, num_blocks=64)
    cold = [answer(alone, [prompt])[0] for prompt in prompts]
    assert [answer(alone, [prompt])[0] for prompt in prompts] == cold, "warm"
    assert alone.stats().cached_prompt_tokens >= sum((len(prompt) - 1) // 16 * 16 for prompt in prompts)

    tight = start(checkpoint, num_blocks=14, max_tokens_per_step=24)
    assert answer(tight, prompts) == cold, "batched, chunked and preempted"
    assert tight.stats().num_preemptions > 0


def test_checking_block_tags_costs_less_than_a_hundredth(monkeypatch: pytest.MonkeyPatch) -> None:
    """On the form that computes less, so that the checks weigh more."""
    check = BlockTags.find_mismatches
    spent_s = 0.0

    def timed(tags: BlockTags, chunks: Sequence[ScheduledChunk]) -> list[int]:
        nonlocal spent_s
        started_s = time.process_time()
        mismatches = check(tags, chunks)
        spent_s += time.process_time() - started_s
        return mismatches

    engine = start(checkpoint_of("llama"), num_blocks=96)
    monkeypatch.setattr(BlockTags, "find_mismatches", timed)
    started_s = time.process_time()
    answer(engine, [[100 + index, *range(200, 320)] for index in range(8)])
    assert 0 < spent_s < (time.process_time() - started_s) / 100
    print(f"block tags: {spent_s / (time.process_time() - started_s):.4%} of the engine's CPU time")
