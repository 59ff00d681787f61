"""What the runner says of its model, and what it refuses."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import psutil
import pytest
import torch

from backend.config import BackendConfig, DeviceConfig, ModelSource
from backend.engine.runner import ModelRunner
from backend.engine.step import ScheduledChunk, StepPlan
from backend.model.errors import ModelLoadError
from tests.support.tiny_models import write_tiny_kimi

STEP = StepPlan((ScheduledChunk(1, [3, 4], 0, [0], True),))


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    directory = tmp_path_factory.mktemp("kimi")
    write_tiny_kimi(directory)
    return directory


def load(checkpoint: Path, max_model_len: int = 100, **device: Any) -> ModelRunner:
    return ModelRunner.load(
        BackendConfig(
            replica_id="r0",
            model=ModelSource(path=str(checkpoint), served_as="tiny", max_model_len=max_model_len),
            device=DeviceConfig(**{"device": "cpu", "threads": 1} | device),
        )
    )


def test_info_describes_the_loaded_model(checkpoint: Path) -> None:
    info = load(checkpoint).info
    assert info.architecture == "deepseek_v3"
    assert (info.vocab_size, info.max_model_len, info.eos_token_ids) == (256, 100, (2,))
    assert info.kv_bytes_per_token == 3 * (64 + 32) * 4
    assert info.kv_memory_bytes == psutil.virtual_memory().total // 8
    assert (info.device, info.dtype) == ("cpu", "float32")
    assert load(checkpoint, max_model_len=10_000).info.max_model_len == 4096


def test_a_step_needs_a_cache_and_a_cache_needs_blocks(checkpoint: Path) -> None:
    runner = load(checkpoint)
    with pytest.raises(ValueError, match="allocate_kv comes before"):
        runner.execute(STEP)
    with pytest.raises(ValueError, match="holds nothing"):
        runner.allocate_kv(0, 16)
    runner.allocate_kv(1, 16)
    logits = runner.execute(STEP)
    assert (logits.shape, logits.dtype) == ((1, 256), torch.float32)


def test_native_kernels_want_whole_vectors_of_tokens(checkpoint: Path) -> None:
    runner = load(checkpoint, weights="packed")
    with pytest.raises(ValueError, match="block_size: 8 must be a multiple of 16"):
        runner.allocate_kv(4, 8)
    plain = load(checkpoint, weights="float32")
    plain.allocate_kv(4, 8)
    assert plain.execute(STEP).shape == (1, 256)


@pytest.mark.parametrize(
    ("device", "complaint"),
    [
        ({"device": "abacus"}, "device.device: 'abacus' is not a device"),
        ({"dtype": "bfloat16", "weights": "packed"}, "device.weights: 'packed' needs device 'cpu'"),
    ],
)
def test_a_placement_that_is_impossible_is_named(
    checkpoint: Path, device: dict[str, Any], complaint: str
) -> None:
    with pytest.raises(ModelLoadError, match=complaint):
        load(checkpoint, **device)


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a CUDA device")
def test_a_missing_gpu_is_named(checkpoint: Path) -> None:
    with pytest.raises(ModelLoadError, match="torch finds no CUDA device"):
        load(checkpoint, device="cuda")


def test_without_a_compiler_torch_serves_unless_packed_is_asked_for(
    checkpoint: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("EMBERGATE_NATIVE", "off")
    assert not load(checkpoint).info.is_native
    with pytest.raises(ModelLoadError, match="there is no working C compiler"):
        load(checkpoint, weights="packed")
