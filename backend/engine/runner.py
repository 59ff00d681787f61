"""Runs the model: from a StepPlan to logits. Knows tensors, not sequences."""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial
from pathlib import Path

import torch
from torch import Tensor

from backend.config import BackendConfig
from backend.engine.forward_batch import build_forward_batch
from backend.engine.kv_blocks import DeviceKvBlocks, KvBlocks
from backend.engine.media_embeddings import MediaEmbeddings, build_overlay
from backend.engine.step import ShouldStop, StepInterruptedError, StepPlan
from backend.model.context import LayerCache
from backend.model.fingerprint import fingerprint_of
from backend.model.loader import Progress, load_model
from backend.model.placement import choose_placement, count_threads
from backend.model.sharding import Sharding
from backend.model.transformer import Transformer


@dataclass(frozen=True, slots=True)
class ModelInfo:
    """What the engine must know of a loaded model. ``kv_bytes_per_token`` is over all layers,
    ``kv_memory_bytes`` what the cache may take of the device when nothing is configured, ``memory_bytes`` all
    that the device has."""

    architecture: str
    vocab_size: int
    max_model_len: int
    eos_token_ids: tuple[int, ...]
    kv_bytes_per_token: int
    kv_memory_bytes: int
    memory_bytes: int
    device: str
    dtype: str
    is_native: bool
    has_vision: bool


class ModelRunner:
    """One loaded model with its KV cache, on one device. Not thread-safe: the engine loop owns it."""

    def __init__(
        self,
        model: Transformer,
        max_model_len: int,
        image_cache_bytes: int = 1 << 28,
        fingerprint: str = "",
    ) -> None:
        self._model = model
        self._fingerprint = fingerprint
        self._kv_blocks: DeviceKvBlocks | None = None
        self._media = None if model.vision is None else MediaEmbeddings(model.vision, image_cache_bytes)
        self._caches: tuple[LayerCache, ...] = ()
        self._block_size = 0
        config, placement = model.config, model.placement
        self.info = ModelInfo(
            architecture=config.family,
            vocab_size=config.vocab_size,
            max_model_len=min(max_model_len, config.max_position_embeddings),
            eos_token_ids=config.eos_token_ids,
            kv_bytes_per_token=config.num_layers * config.kv_row_width * placement.dtype.itemsize,
            kv_memory_bytes=placement.kv_memory_bytes(),
            memory_bytes=placement.memory_bytes(),
            device=str(placement.device),
            dtype=str(placement.dtype).removeprefix("torch."),
            is_native=placement.native is not None,
            has_vision=model.vision is not None,
        )

    @classmethod
    def load(
        cls,
        config: BackendConfig,
        progress: Progress = lambda share, doing: None,
        sharding: Sharding | None = None,
    ) -> ModelRunner:
        """Read the model that ``config.model.path`` names and place it on the configured device.

        Sets the number of threads that torch uses in this process. ``progress`` is called with the share done
        (0 to 1) and what is being done; ``sharding`` makes it one rank's part of the model.

        Raises:
            backend.model.errors.ModelLoadError: naming the file and the tensor or field that is wrong.
        """
        torch.set_num_threads(count_threads(config.device))
        with torch.inference_mode():
            model = load_model(
                Path(config.model.path),
                config.model.max_model_len,
                partial(choose_placement, config.device),
                text_only=config.model.text_only,
                progress=progress,
                sharding=sharding,
            )
        return cls(
            model,
            config.model.max_model_len,
            int(config.cache.image_memory_gib * 2**30),
            fingerprint_of(Path(config.model.path)),
        )

    @property
    def kv_blocks(self) -> KvBlocks | None:
        """The cache block by block, once it is allocated; None for a model whose files are not known."""
        return self._kv_blocks

    def allocate_kv(self, num_blocks: int, block_size: int) -> None:
        """Allocate the paged KV cache; called once, before the first step.

        Raises:
            ValueError: when there would be no block, or the native kernels cannot use blocks of that size.
        """
        if num_blocks < 1 or block_size < 1:
            raise ValueError(f"a cache of {num_blocks} blocks of {block_size} tokens holds nothing")
        if self.info.is_native and block_size % 16:
            raise ValueError(f"block_size: {block_size} must be a multiple of 16 for the native kernels")
        self._block_size = block_size
        with torch.inference_mode():
            self._caches = self._model.new_caches(num_blocks, block_size)
        if self._fingerprint:
            self._kv_blocks = DeviceKvBlocks(self._caches, model=self._fingerprint, block_size=block_size)

    @torch.inference_mode()
    def execute_nothing(self) -> None:
        """Take part in a step in which only others have tokens."""
        self._model.forward_nothing()

    @torch.inference_mode()
    def execute(self, plan: StepPlan, should_stop: ShouldStop | None = None) -> Tensor:
        """Compute one step and return the logits ``[rows, vocab]`` in float32.

        There are ``num_rows`` rows of each chunk, in the order of ``plan.chunks`` and of positions. The KV of
        every token of the plan is in the cache afterwards. The tensor belongs to the caller.

        Args:
            should_stop: asked between the parts of the model; once it says yes, nothing more is written.

        Raises:
            StepInterruptedError: when ``should_stop`` said yes.
            ValueError: when the plan does not fit its own block tables, or no cache was allocated.
        """
        if not self._caches:
            raise ValueError("allocate_kv comes before the first step")
        batch = build_forward_batch(plan, self._block_size, self._model.placement.device)

        def pause() -> None:
            if should_stop is not None and should_stop():
                raise StepInterruptedError

        overlay = build_overlay(plan, batch, self._media, pause)
        return self._model.forward(batch, self._caches, pause, overlay)
