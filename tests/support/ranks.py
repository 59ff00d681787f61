"""Several ranks as one engine, for tests."""

from __future__ import annotations

import itertools
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from backend.config import (
    BackendConfig,
    CacheConfig,
    DeviceConfig,
    ModelSource,
    ParallelConfig,
    SchedulerConfig,
)
from backend.engine.engine import Engine
from backend.engine.runner import ModelRunner
from backend.parallel.leader import Followers, ParallelRunner, start_ranks


def config_of(checkpoint: Path, tensor: int, expert: int) -> BackendConfig:
    """A small replica of so many ranks, each with one thread and dense weights."""
    return BackendConfig(
        replica_id="r0",
        model=ModelSource(path=str(checkpoint), served_as="checkpoint", max_model_len=192),
        cache=CacheConfig(num_blocks=64),
        scheduler=SchedulerConfig(max_tokens_per_step=48, max_running=8),
        device=DeviceConfig(device="cpu", dtype="float32", threads=1, weights="float32"),
        parallel=ParallelConfig(tensor=tensor, expert=expert, exchange_timeout_s=60.0),
        start_timeout_s=120.0,
    )


def one_rank(checkpoint: Path) -> Engine:
    config = config_of(checkpoint, 1, 1)
    return engine_of(ModelRunner.load(config), config)


def engine_of(runner: ModelRunner | ParallelRunner, config: BackendConfig) -> Engine:
    return Engine(runner, config, clock_s=time.monotonic, draw_seed=itertools.count().__next__)


@contextmanager
def ranks(checkpoint: Path, tensor: int, expert: int) -> Iterator[tuple[Engine, ParallelRunner, Followers]]:
    """An engine over ``tensor * expert`` ranks, this process being the first."""
    config = config_of(checkpoint, tensor, expert)
    runner, followers = start_ranks(config, lambda rank, exit_code: None)
    try:
        yield engine_of(runner, config), runner, followers
    finally:
        followers.close()
        runner.close()
