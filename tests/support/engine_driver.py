"""Drives an Engine on a real checkpoint, in this process."""

from __future__ import annotations

import itertools
import time
from collections.abc import Sequence
from pathlib import Path

from backend.config import (
    BackendConfig,
    CacheConfig,
    DeviceConfig,
    ModelSource,
    SchedulerConfig,
    SpeculationConfig,
)
from backend.engine.engine import Engine
from backend.engine.messages import SamplingParams, SequenceRequest
from backend.engine.runner import ModelRunner

MAX_RUNNING = 8


def engine_on(
    checkpoint: Path,
    *,
    max_model_len: int,
    num_blocks: int,
    max_tokens_per_step: int = 512,
    threads: int = 1,
    speculation: SpeculationConfig | None = None,
) -> Engine:
    """A fresh engine with an empty cache."""
    config = BackendConfig(
        replica_id="r0",
        model=ModelSource(path=str(checkpoint), served_as="checkpoint", max_model_len=max_model_len),
        cache=CacheConfig(num_blocks=num_blocks),
        scheduler=SchedulerConfig(max_tokens_per_step=max_tokens_per_step, max_running=MAX_RUNNING),
        device=DeviceConfig(device="cpu", dtype="float32", threads=threads),
        speculation=speculation or SpeculationConfig(),
    )
    runner = ModelRunner.load(config)
    return Engine(runner, config, clock_s=time.monotonic, draw_seed=itertools.count().__next__)


def generate(
    engine: Engine, prompts: Sequence[list[int]], *, max_tokens: int, temperature: float = 0.0
) -> list[list[int]]:
    """Give all prompts at once; the generated tokens of each, ends of sequences ignored."""
    answers: list[list[int]] = [[] for _ in prompts]
    for index, prompt in enumerate(prompts):
        sampling = SamplingParams(max_tokens=max_tokens, temperature=temperature, seed=index, ignore_eos=True)
        engine.submit(SequenceRequest(sequence_id=index, prompt_token_ids=prompt, sampling=sampling))
    while engine.has_work:
        engine.step()
        for output in engine.take_outputs():
            assert output.finish_reason in (None, "length"), output.message
            answers[output.sequence_id] += output.token_ids
    engine.check_invariants()
    return answers
