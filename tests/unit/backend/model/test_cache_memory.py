"""The cache's memory: taken as it is used, and never read where nothing was written."""

from __future__ import annotations

import time
from collections.abc import Callable
from pathlib import Path

import psutil
import pytest
import torch
from torch import Tensor

from backend.config import DeviceConfig
from backend.engine.forward_batch import build_forward_batch
from backend.engine.step import ScheduledChunk, StepPlan
from backend.model.lazy_memory import lazy_zeros
from backend.model.loader import load_model
from backend.model.placement import choose_placement
from tests.support.tiny_models import write_tiny_kimi, write_tiny_llama

MIB = 1 << 20
BLOCK_SIZE = 16


def resident_bytes() -> int:
    return int(psutil.Process().memory_info().rss)


def test_a_gibibyte_is_taken_in_no_time_and_only_as_it_is_written() -> None:
    before, began = resident_bytes(), time.perf_counter()
    zeros = lazy_zeros((1024, MIB // 4), torch.float32)
    assert time.perf_counter() - began < 0.1
    assert resident_bytes() - before < 16 * MIB
    zeros[7] = 1.0
    assert resident_bytes() - before < 32 * MIB
    assert float(zeros[6:9].sum()) == MIB // 4


def test_its_pages_are_aligned_and_of_the_wanted_shape_and_type() -> None:
    zeros = lazy_zeros((3, 5, 7), torch.bfloat16)
    assert (zeros.shape, zeros.dtype, zeros.data_ptr() % 4096) == ((3, 5, 7), torch.bfloat16, 0)
    assert zeros.is_contiguous()
    assert not zeros.any()


def test_more_than_there_is_room_for_is_named() -> None:
    with pytest.raises(MemoryError, match=r"16777216\.00 GiB of memory cannot be had"):
        lazy_zeros((1 << 52,), torch.float32)


@pytest.mark.parametrize("weights", ["packed", "float32"])
@pytest.mark.parametrize("write", [write_tiny_llama, write_tiny_kimi])
def test_what_was_never_written_spoils_nothing(
    tmp_path: Path, write: Callable[[Path], object], weights: str
) -> None:
    write(tmp_path)
    device = DeviceConfig(device="cpu", dtype="float32", threads=1, weights=weights)  # type: ignore[arg-type]
    model = load_model(tmp_path, 256, lambda config: choose_placement(device, config))
    prompt, table, other = list(range(3, 44)), [5, 2, 7], [1, 4, 3]

    def run(fill: float) -> Tensor:
        caches = model.new_caches(9, BLOCK_SIZE)
        for part in (part for cache in caches for part in cache):
            part.fill_(fill)
        rows = []
        for start, end, beside in ((0, 1, 1), (1, 35, 1), (35, 36, 30), (36, 41, 1)):
            chunks = (
                ScheduledChunk(1, prompt[start:end], start, table, True),
                ScheduledChunk(2, prompt[:beside], 0, other, True),
            )
            batch = build_forward_batch(StepPlan(chunks), BLOCK_SIZE, torch.device("cpu"))
            rows.append(model.forward(batch, caches))
        return torch.cat(rows)

    with torch.inference_mode():
        clean = run(0.0)
        assert clean.isfinite().all()
        assert torch.equal(run(torch.nan), clean)
