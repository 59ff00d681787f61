"""The model as the engine sees it."""

from __future__ import annotations

from typing import Protocol

from torch import Tensor

from backend.engine.kv_blocks import KvBlocks
from backend.engine.step import ShouldStop, StepPlan


class RunnerInfo(Protocol):
    """What the engine must know of a loaded model."""

    @property
    def vocab_size(self) -> int: ...
    @property
    def max_model_len(self) -> int: ...
    @property
    def eos_token_ids(self) -> tuple[int, ...]: ...
    @property
    def kv_bytes_per_token(self) -> int: ...
    @property
    def kv_memory_bytes(self) -> int: ...
    @property
    def memory_bytes(self) -> int: ...
    @property
    def device(self) -> str: ...
    @property
    def has_vision(self) -> bool: ...


class StepRunner(Protocol):
    """A loaded model (:class:`backend.engine.runner.ModelRunner`)."""

    @property
    def info(self) -> RunnerInfo: ...

    @property
    def kv_blocks(self) -> KvBlocks | None:
        """Its KV cache block by block, once allocated; None where blocks cannot leave or enter."""

    def allocate_kv(self, num_blocks: int, block_size: int) -> None: ...
    def execute(self, plan: StepPlan, should_stop: ShouldStop | None = None) -> Tensor: ...
