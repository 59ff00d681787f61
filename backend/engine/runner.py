"""Runs the model: from a StepPlan to logits. Knows tensors, not sequences."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from backend.config import BackendConfig
from backend.engine.step import StepPlan


@dataclass(frozen=True, slots=True)
class ModelInfo:
    """What the engine must know of a loaded model. ``kv_bytes_per_token`` is over all layers."""

    architecture: str
    vocab_size: int
    max_model_len: int
    eos_token_ids: tuple[int, ...]
    kv_bytes_per_token: int
    device: str
    dtype: str
    num_parameters: int


class ModelRunner:
    """One loaded model with its KV cache, on one device. Not thread-safe: the engine loop owns it."""

    @classmethod
    def load(cls, config: BackendConfig) -> ModelRunner:
        """Read the model that ``config.model.path`` names and place it on the configured device.

        Raises:
            backend.model.errors.ModelLoadError: naming the file and the tensor or field that is wrong.
        """
        raise ValueError(config.model.path)

    @property
    def info(self) -> ModelInfo:
        raise ValueError

    def allocate_kv(self, num_blocks: int, block_size: int) -> None:
        """Allocate the paged KV cache; called once, before the first step."""

    def execute(self, plan: StepPlan) -> Tensor:
        """Compute one step and return the logits ``[rows, vocab]`` in float32.

        There is one row per chunk with ``needs_logits``, in the order of ``plan.chunks``. The KV of every
        token of the plan is in the cache afterwards. The tensor belongs to the caller.
        """
        return torch.empty(plan.num_tokens)
