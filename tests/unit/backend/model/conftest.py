"""Runs models chunk by chunk, as the engine would."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from itertools import pairwise
from pathlib import Path

import pytest
import torch
from torch import Tensor

from backend.config import BackendConfig, DeviceConfig, ModelSource
from backend.engine.runner import ModelRunner
from backend.engine.step import ScheduledChunk, StepPlan

BLOCK_SIZE = 16


class Sequencer:
    """One sequence on a runner: computes its tokens in chunks and returns the logits after each chunk."""

    def __init__(self, runner: ModelRunner, token_ids: Sequence[int], block_table: Sequence[int]) -> None:
        self.runner = runner
        self.token_ids = list(token_ids)
        self.block_table = list(block_table)

    def chunk(self, start: int, end: int, *, needs_logits: bool = True) -> ScheduledChunk:
        return ScheduledChunk(7, self.token_ids[start:end], start, self.block_table, needs_logits)

    def compute(self, *bounds: int) -> Tensor:
        """Compute the chunks between the bounds; logits ``[chunks, vocab]``."""
        rows = [self.runner.execute(StepPlan((self.chunk(start, end),))) for start, end in pairwise(bounds)]
        return torch.cat(rows)


LoadRunner = Callable[..., ModelRunner]


@pytest.fixture
def load_runner() -> LoadRunner:
    """Load a path onto the CPU, by default with one thread and 64 blocks."""

    def load(
        path: Path,
        *,
        weights: str = "auto",
        dtype: str = "float32",
        num_blocks: int = 64,
        threads: int = 1,
        text_only: bool = False,
    ) -> ModelRunner:
        runner = ModelRunner.load(
            BackendConfig(
                replica_id="r0",
                model=ModelSource(path=str(path), served_as="tiny", max_model_len=512, text_only=text_only),
                device=DeviceConfig(device="cpu", dtype=dtype, threads=threads, weights=weights),  # type: ignore[arg-type]
            )
        )
        runner.allocate_kv(num_blocks, BLOCK_SIZE)
        return runner

    return load


@pytest.fixture
def sequencer() -> type[Sequencer]:
    return Sequencer
