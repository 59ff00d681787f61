"""The far end of Kimi's context: real arithmetic at positions up to 262,143, on a tiny model.

The context before the end is made up, row by row, in the caches of both models; what is compared are a real
chunk and real decodes behind it. The reference is transformers' model in float64.

How exact: sums over 262,144 keys in float32 stray by some 4e-5 of the largest logit (measured here; those of
transformers' own float32 form stray as much), so the bound is the 1e-4 of short contexts. What must *not* be
more exact is the rotary angle: see docs/decisions/0510-rotary-angles-in-float32.md.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import psutil
import pytest
import torch
from torch import Tensor

from backend.config import DeviceConfig
from backend.engine.forward_batch import build_forward_batch
from backend.engine.step import ScheduledChunk, StepPlan
from backend.model.context import LayerCache
from backend.model.loader import load_model
from backend.model.placement import choose_placement
from backend.model.transformer import Transformer
from tests.support.far_context import FarContext, continue_in_float64
from tests.support.tiny_models import KIMI_YARN, write_tiny_kimi

MAX_LENGTH = 262_144
CHUNK, DECODES = 33, 4
CONTEXT = MAX_LENGTH - CHUNK - DECODES
BLOCK_SIZE = 16
NUM_BLOCKS = MAX_LENGTH // BLOCK_SIZE
SHAPE = {
    "max_position_embeddings": MAX_LENGTH,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "num_key_value_heads": 2,
    "kv_lora_rank": 32,
    "rope_parameters": {**KIMI_YARN, "original_max_position_embeddings": 4096},
}


class FarRun:
    """One sequence on a model with a cache for the full length."""

    def __init__(self, directory: Path, weights: str, block_table: Sequence[int]) -> None:
        device = DeviceConfig(device="cpu", dtype="float32", threads=1, weights=weights)  # type: ignore[arg-type]
        self._model: Transformer = load_model(
            directory, MAX_LENGTH, lambda config: choose_placement(device, config)
        )
        self.block_table = list(block_table)
        self.caches: tuple[LayerCache, ...] = self._model.new_caches(NUM_BLOCKS + 2, BLOCK_SIZE)

    def compute(self, token_ids: Sequence[int], start: int) -> Tensor:
        """Logits ``[vocab]`` of the last of the tokens, the first of which is at position ``start``."""
        plan = StepPlan((ScheduledChunk(1, token_ids, start, self.block_table, True),))
        batch = build_forward_batch(plan, BLOCK_SIZE, torch.device("cpu"))
        with torch.inference_mode():
            return self._model.forward(batch, self.caches)[0]


@pytest.mark.slow
def test_logits_at_the_far_end_equal_the_reference_in_float64(tmp_path: Path) -> None:
    reference = write_tiny_kimi(tmp_path, **SHAPE)
    context = FarContext.make(reference, CONTEXT)
    rng = torch.Generator().manual_seed(3)
    ids = torch.randint(3, 256, (CHUNK + DECODES,), generator=rng).tolist()
    table = torch.randperm(NUM_BLOCKS + 2, generator=rng)[:NUM_BLOCKS].tolist()
    expected = continue_in_float64(reference, context, ids)[CHUNK - 1 :]
    for weights in ("packed", "float32"):
        run = FarRun(tmp_path, weights, table)
        context.write_to(run.caches, table, BLOCK_SIZE)
        rows = [run.compute(ids[:CHUNK], CONTEXT)]
        rows += [run.compute(ids[at : at + 1], CONTEXT + at) for at in range(CHUNK, CHUNK + DECODES)]
        error = (torch.stack(rows).double() - expected).abs().max() / expected.abs().max()
        assert error < 1e-4, f"{weights}: relative error {error:.2e}"
        del run


def test_a_sequence_takes_memory_for_its_own_blocks_only(tmp_path: Path) -> None:
    write_tiny_kimi(tmp_path, **SHAPE)
    run = FarRun(tmp_path, "packed", [NUM_BLOCKS + 1, 9, 5000, *range(20, 80)])
    run.compute([5] * 400, 0)
    before = psutil.Process().memory_info().rss
    run.compute([5] * 400, 400)
    run.compute([5], 800)
    grown = psutil.Process().memory_info().rss - before
    assert sum(cache.nbytes for (cache,) in run.caches) > 128 * 2**20
    assert grown < 16 * 2**20
