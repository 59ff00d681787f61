"""Both families against transformers on tiny random checkpoints, with and without the native kernels."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from backend.engine.step import ScheduledChunk, StepPlan
from backend.model import mla
from backend.model.config import MlaConfig
from tests.support.tiny_models import write_tiny_kimi, write_tiny_llama

MAX_RELATIVE_ERROR = 1e-4
LENGTH = 90

SHAPES: dict[str, tuple[Callable[..., Any], dict[str, Any]]] = {
    "llama": (write_tiny_llama, {}),
    "llama-tied": (write_tiny_llama, {"tie_word_embeddings": True, "num_key_value_heads": 1}),
    "kimi": (write_tiny_kimi, {}),
    "kimi-groups": (write_tiny_kimi, {"n_group": 4, "topk_group": 2, "norm_topk_prob": False}),
    "kimi-no-q-latent": (write_tiny_kimi, {"q_lora_rank": None}),
    "kimi-all-experts": (write_tiny_kimi, {"num_experts_per_tok": 8, "n_shared_experts": 2}),
    "kimi-narrow-values": (write_tiny_kimi, {"qk_nope_head_dim": 64}),
    "kimi-plain-rope": (write_tiny_kimi, {"rope_parameters": {"rope_type": "default", "rope_theta": 1e4}}),
}


@pytest.fixture(params=SHAPES)
def shape(request: pytest.FixtureRequest) -> tuple[Callable[..., Any], dict[str, Any]]:
    return SHAPES[request.param]


@pytest.mark.parametrize("chunks", ["expanded", "absorbed"])
@pytest.mark.parametrize("weights", ["packed", "float32"])
def test_logits_equal_transformers_cold_chunked_decoded_and_mixed(
    tmp_path: Path,
    shape: Any,
    weights: str,
    chunks: str,
    load_runner: Any,
    sequencer: Any,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    write, changes = shape
    longest = 1 if chunks == "expanded" else LENGTH
    monkeypatch.setattr(mla, "count_short_chunk", lambda *shape: longest)
    reference = write(tmp_path, **changes)
    ids = torch.randint(3, 256, (LENGTH,), generator=torch.Generator().manual_seed(3)).tolist()
    with torch.no_grad():
        expected = reference(torch.tensor([ids])).logits[0]
    runner = load_runner(tmp_path, weights=weights)
    assert runner.info.is_native == (weights == "packed")

    cold = sequencer(runner, ids, range(5, 15))
    assert_close(cold.compute(0, LENGTH), expected[[LENGTH - 1]])
    assert_close(cold.compute(0, 1, 2, 35, 36, 70, LENGTH), expected[[0, 1, 34, 35, 69, LENGTH - 1]])

    cached = sequencer(runner, ids, [5, 6, 30, 31, 32, 33])
    assert_close(cached.compute(32, LENGTH), expected[[LENGTH - 1]])

    other = sequencer(runner, ids[:20], [40, 41])
    other.compute(0, 19)
    plan = StepPlan((cold.chunk(60, LENGTH), other.chunk(19, 20), cached.chunk(50, 60, needs_logits=False)))
    assert_close(runner.execute(plan), expected[[LENGTH - 1, 19]])


@pytest.mark.parametrize("weights", ["packed", "float32"])
def test_a_context_too_long_to_expand_is_read_as_it_is_some_queries_at_a_time(
    tmp_path: Path, weights: str, load_runner: Any, sequencer: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    reference = write_tiny_kimi(tmp_path)
    ids = list(range(3, 93))
    with torch.no_grad():
        expected = reference(torch.tensor([ids])).logits[0]
    monkeypatch.setattr(mla, "count_short_chunk", lambda *shape: 1)
    monkeypatch.setattr(mla, "MAX_EXPANDED_BYTES", 0)
    runner = load_runner(tmp_path, weights=weights)
    whole = sequencer(runner, ids, range(6)).compute(0, 20, 90)
    assert_close(whole, expected[[19, 89]])
    monkeypatch.setattr(mla, "_MAX_SCORES", 4 * 90 * 7)
    assert torch.equal(sequencer(runner, ids, range(6, 12)).compute(0, 20, 90), whole)


def test_the_shorter_form_is_chosen_by_the_work_it_takes() -> None:
    kimi = MlaConfig(1536, 512, 128, 64, 128, 1e-6)
    assert mla.count_short_chunk(kimi, 64, 64) == 170
    assert mla.count_short_chunk(replace(kimi, kv_lora_rank=32), 64, 64) == mla.MAX_SHORT_CHUNK


def test_a_step_without_wanted_logits_still_fills_the_cache(
    tmp_path: Path, load_runner: Any, sequencer: Any
) -> None:
    reference = write_tiny_kimi(tmp_path)
    ids = list(range(3, 43))
    runner = load_runner(tmp_path)
    sequence = sequencer(runner, ids, [1, 2, 3])
    logits = runner.execute(StepPlan((sequence.chunk(0, 33, needs_logits=False),)))
    assert logits.shape == (0, 256)
    with torch.no_grad():
        expected = reference(torch.tensor([ids])).logits[0]
    assert_close(sequence.compute(33, 40), expected[[39]])


@pytest.mark.parametrize("write", [write_tiny_llama, write_tiny_kimi])
def test_a_row_has_the_same_bits_alone_and_in_a_batch(
    tmp_path: Path, write: Callable[[Path], object], load_runner: Any
) -> None:
    write(tmp_path)
    runner = load_runner(tmp_path, weights="packed")
    tables = [[index * 2, index * 2 + 1] for index in range(11)]
    prompts = [[(7 * index + at) % 250 + 3 for at in range(20)] for index in range(11)]
    chunks = [ScheduledChunk(i, prompts[i], 0, tables[i], True) for i in range(11)]
    alone = torch.cat([runner.execute(StepPlan((chunk,))) for chunk in chunks])
    assert torch.equal(runner.execute(StepPlan(tuple(chunks))), alone)
    decodes = [ScheduledChunk(i, [5 + i], 20, tables[i], True) for i in range(11)]
    alone = torch.cat([runner.execute(StepPlan((decode,))) for decode in decodes])
    assert torch.equal(runner.execute(StepPlan(tuple(decodes))), alone)


def assert_close(actual: Tensor, expected: Tensor) -> None:
    assert actual.shape == expected.shape
    error = (actual - expected).abs().max() / expected.abs().max()
    assert error < MAX_RELATIVE_ERROR, f"relative error {error:.2e}"


@pytest.mark.parametrize("write", [write_tiny_llama, write_tiny_kimi])
def test_bfloat16_runs_and_stays_near(
    tmp_path: Path, write: Callable[..., Any], load_runner: Any, sequencer: Any
) -> None:
    reference = write(tmp_path)
    ids = list(range(3, 63))
    with torch.no_grad():
        expected = reference(torch.tensor([ids])).logits[0]
    runner = load_runner(tmp_path, dtype="bfloat16")
    assert (runner.info.dtype, runner.info.is_native) == ("bfloat16", False)
    logits = sequencer(runner, ids, [1, 2, 3, 4]).compute(0, 30, 59, 60)
    assert logits.dtype == torch.float32
    similarity = torch.cosine_similarity(logits, expected[[29, 58, 59]])
    assert similarity.min() > 0.98, similarity
