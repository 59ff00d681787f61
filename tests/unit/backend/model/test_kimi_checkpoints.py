"""Checkpoints in Kimi K2.5's own forms against transformers with independently dequantised weights."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from backend.config import BackendConfig, ModelSource
from backend.engine.runner import ModelRunner
from backend.engine.step import StepPlan
from backend.model.errors import ModelLoadError, UnsupportedModelError
from backend.model.tiny_checkpoint import Form, TinyShape, write_tiny_checkpoint
from tests.support.kimi_reference import build_reference, read_weights
from tests.support.kimi_text import tiny_ranks

MAX_RELATIVE_ERROR = 1e-4
LENGTH = 90
SHAPE = TinyShape(num_layers=3, original_positions=64)
GROUPS = TinyShape(num_layers=2, num_groups=4, num_chosen_groups=2, experts_per_token=3)
FORMS: tuple[Form, ...] = ("bf16", "fp8", "int4")
EXPERT = "language_model.model.layers.1.mlp.experts.2.down_proj.weight"


def write(directory: Path, form: Form, shape: TinyShape = SHAPE) -> Path:
    write_tiny_checkpoint(directory, form, tiny_ranks(), seed=3, shape=shape)
    return directory


def draw_ids(length: int = LENGTH) -> list[int]:
    ids: list[int] = torch.randint(0, 256, (length,), generator=torch.Generator().manual_seed(3)).tolist()
    return ids


def assert_close(actual: Tensor, expected: Tensor) -> None:
    assert actual.shape == expected.shape
    error = (actual - expected).abs().max() / expected.abs().max()
    assert error < MAX_RELATIVE_ERROR, f"relative error {error:.2e}"


@pytest.mark.parametrize("weights", ["packed", "float32"])
@pytest.mark.parametrize("form", FORMS)
def test_every_form_equals_its_dequantised_reference(
    tmp_path: Path, form: Form, weights: str, load_runner: Any, sequencer: Any
) -> None:
    checkpoint = write(tmp_path / form, form)
    ids = draw_ids()
    with torch.no_grad():
        expected = build_reference(checkpoint)(torch.tensor([ids])).logits[0]
    runner = load_runner(checkpoint, weights=weights, text_only=True)
    assert runner.info.is_native == (weights == "packed")

    cold = sequencer(runner, ids, range(5, 15))
    assert_close(cold.compute(0, LENGTH), expected[[LENGTH - 1]])
    # Positions beyond 64 are beyond the original length of YaRN here.
    assert_close(cold.compute(0, 1, 2, 35, 36, 70, LENGTH), expected[[0, 1, 34, 35, 69, LENGTH - 1]])
    cached = sequencer(runner, ids, [5, 6, 30, 31, 32, 33])
    assert_close(cached.compute(32, LENGTH), expected[[LENGTH - 1]])
    mixed = StepPlan((cold.chunk(60, LENGTH), cached.chunk(50, 51)))
    assert_close(runner.execute(mixed), expected[[LENGTH - 1, 50]])


@pytest.mark.parametrize("weights", ["packed", "float32"])
def test_groups_with_tied_experts_and_tied_groups(
    tmp_path: Path, weights: str, load_runner: Any, sequencer: Any
) -> None:
    """Twin experts in twin groups: three of them are chosen, so that a cut always falls between equals."""
    checkpoint = write(tmp_path / "int4", "int4", GROUPS)
    make_twins(checkpoint, GROUPS)
    ids = draw_ids(40)
    with torch.no_grad():
        expected = build_reference(checkpoint)(torch.tensor([ids])).logits[0]
    runner = load_runner(checkpoint, weights=weights, text_only=True)
    logits = sequencer(runner, ids, [1, 2, 3]).compute(0, 20, 21, 39, 40)
    assert_close(logits, expected[[19, 20, 38, 39]])


def make_twins(checkpoint: Path, shape: TinyShape) -> None:
    """Make every group of experts the same as the first, and in it every odd expert the one before."""
    per_group = shape.num_experts // shape.num_groups
    for file in checkpoint.glob("model-*.safetensors"):
        tensors = load_file(file)
        for name in list(tensors):
            prefix, _, rest = name.partition(".mlp.experts.")
            if rest:
                expert, part = rest.split(".", 1)
                twin = int(expert) % per_group // 2 * 2
                tensors[name] = tensors[f"{prefix}.mlp.experts.{twin}.{part}"].clone()
            elif ".mlp.gate." in name:
                order = torch.arange(shape.num_experts) % per_group // 2 * 2
                tensors[name] = tensors[name][order].contiguous()
        save_file(tensors, file, metadata={"format": "pt"})


@pytest.mark.parametrize("prefix", ["language_model.model.", "language_model.", "model."])
def test_the_published_prefixes_mean_the_same(
    tmp_path: Path, prefix: str, load_runner: Any, sequencer: Any
) -> None:
    checkpoint = write(tmp_path / "bf16", "bf16")
    ids = draw_ids(20)
    expected = sequencer(load_runner(checkpoint, text_only=True), ids, [1, 2]).compute(0, 20)
    rename(checkpoint, prefix)
    logits = sequencer(load_runner(checkpoint, text_only=True), ids, [1, 2]).compute(0, 20)
    assert torch.equal(logits, expected)


def rename(checkpoint: Path, prefix: str) -> None:
    def renamed(name: str) -> str:
        if prefix == "model.":
            return name.removeprefix("language_model.")
        return name.replace("language_model.model.", prefix)

    for file in checkpoint.glob("model-*.safetensors"):
        tensors = {renamed(name): tensor for name, tensor in load_file(file).items()}
        save_file(tensors, file, metadata={"format": "pt"})
    index = checkpoint / "model.safetensors.index.json"
    content = json.loads(index.read_text())
    content["weight_map"] = {renamed(name): file for name, file in content["weight_map"].items()}
    index.write_text(json.dumps(content))


def test_scales_too_small_for_half_precision_are_kept(
    tmp_path: Path, load_runner: Any, sequencer: Any
) -> None:
    """They stand in one expert's down projection only, so that the halves of a layer differ in form."""
    checkpoint = write(tmp_path / "int4", "int4", TinyShape(num_layers=2, has_vision=False))
    shard = checkpoint / "model-00002-of-000003.safetensors"
    tensors = load_file(shard)
    tensors[f"{EXPERT}_scale"] *= 2.0**-30
    save_file(tensors, shard, metadata={"format": "pt"})
    ids = draw_ids(24)
    with torch.no_grad():
        expected = build_reference(checkpoint)(torch.tensor([ids])).logits[0]
    runner = load_runner(checkpoint, weights="packed")
    assert_close(sequencer(runner, ids, [1, 2]).compute(0, 23, 24), expected[[22, 23]])


def test_experts_of_several_forms_in_one_layer_are_refused(tmp_path: Path, load_runner: Any) -> None:
    checkpoint = write(tmp_path / "int4", "int4", TinyShape(num_layers=2, has_vision=False))
    shard = checkpoint / "model-00002-of-000003.safetensors"
    tensors = load_file(shard)
    for part in ("packed", "scale", "shape"):
        del tensors[f"{EXPERT}_{part}"]
    tensors[EXPERT] = torch.zeros(128, 64, dtype=torch.bfloat16)
    save_file(tensors, shard, metadata={"format": "pt"})
    index = checkpoint / "model.safetensors.index.json"
    content = json.loads(index.read_text())
    content["weight_map"] = {
        name: file for name, file in content["weight_map"].items() if not name.startswith(EXPERT)
    } | {EXPERT: shard.name}
    index.write_text(json.dumps(content))
    with pytest.raises(UnsupportedModelError, match=r"layers\.1\.mlp.* not all stored in one form"):
        load_runner(checkpoint, weights="packed")
    load_runner(checkpoint, weights="float32")


def test_the_forms_hold_the_same_numbers_within_a_step(tmp_path: Path) -> None:
    """One seed, three forms: what differs is what rounding to eight or four bits loses."""
    shape = TinyShape(num_layers=2)
    plain, fp8, int4 = (read_weights(write(tmp_path / form, form, shape)) for form in FORMS)
    assert plain.keys() == fp8.keys() == int4.keys()
    for name, weight in plain.items():
        top = weight.abs().max()
        assert (fp8[name] - weight).abs().max() <= top / 24, name
        assert (int4[name] - weight).abs().max() <= top / 14, name
        is_expert = ".mlp.experts." in name
        assert torch.equal(int4[name], weight) != is_expert, name
    assert min(int4[name].min() / int4[name].abs().max() for name in int4 if ".mlp.experts." in name) == -1


def test_a_tower_is_loaded_unless_the_model_is_to_be_text_only(
    tmp_path: Path, load_runner: Any, caplog: pytest.LogCaptureFixture
) -> None:
    checkpoint = write(tmp_path / "int4", "int4", TinyShape(num_layers=1))
    assert load_runner(checkpoint).info.has_vision
    with caplog.at_level("INFO", logger="backend.model"):
        assert not load_runner(checkpoint, text_only=True).info.has_vision
    (record,) = caplog.records
    assert record.getMessage() == "text only: vision tensors left out"
    num_tensors = sum(name.startswith(("vision", "mm_")) for name in read_weights(checkpoint))
    assert record.__dict__["fields"]["num_tensors"] == num_tensors > 30


def test_one_without_a_tower_needs_no_word(tmp_path: Path, load_runner: Any) -> None:
    load_runner(write(tmp_path / "int4", "int4", TinyShape(num_layers=1, has_vision=False)))


def test_progress_tells_every_layer(tmp_path: Path) -> None:
    checkpoint = write(tmp_path / "bf16", "bf16", TinyShape(num_layers=3, has_vision=False))
    told: list[tuple[float, str]] = []
    config = BackendConfig(replica_id="r0", model=ModelSource(path=str(checkpoint), served_as="tiny"))
    ModelRunner.load(config, lambda share, doing: told.append((share, doing)))
    assert told == [
        (0.0, "loading the embedding"),
        (0.2, "loading layer 1 of 3"),
        (0.4, "loading layer 2 of 3"),
        (0.6, "loading layer 3 of 3"),
        (0.8, "loading the head"),
    ]


@pytest.mark.parametrize(
    ("form", "change", "complaint"),
    [
        (
            "int4",
            lambda tensors: tensors.update({f"{EXPERT}_shape": torch.tensor([128, 32])}),
            rf"safetensors: {EXPERT}_shape: \[128, 32\] must be \[128, 64\]",
        ),
        (
            "int4",
            lambda tensors: tensors.update({f"{EXPERT}_packed": torch.zeros(128, 8, dtype=torch.int64)}),
            rf"{EXPERT}_packed: type torch.int64 must be torch.int32",
        ),
        (
            "int4",
            lambda tensors: tensors.update({f"{EXPERT}_scale": torch.zeros(128, 1)}),
            rf"{EXPERT}_scale: shape \[128, 1\] must be \[128, 2\]",
        ),
        (
            "fp8",
            lambda tensors: tensors.update({f"{EXPERT}_scale_inv": torch.zeros(1, 2)}),
            rf"{EXPERT}_scale_inv: shape \[1, 2\] must be \[1, 1\]",
        ),
        (
            "fp8",
            lambda tensors: tensors.update({EXPERT: torch.zeros(128, 64)}),
            rf"{EXPERT}: type torch.float32 must be torch.float8_e4m3fn",
        ),
    ],
)
def test_a_quantised_tensor_of_another_kind_is_named(
    tmp_path: Path, form: Form, change: Callable[[dict[str, Tensor]], None], complaint: str, load_runner: Any
) -> None:
    checkpoint = write(tmp_path / form, form, TinyShape(num_layers=2, has_vision=False))
    shard = checkpoint / "model-00002-of-000003.safetensors"
    tensors = load_file(shard)
    change(tensors)
    save_file(tensors, shard, metadata={"format": "pt"})
    with pytest.raises(ModelLoadError, match=complaint):
        load_runner(checkpoint)


def test_two_names_of_one_tensor_are_refused(tmp_path: Path, load_runner: Any) -> None:
    checkpoint = write(tmp_path / "bf16", "bf16", TinyShape(num_layers=1, has_vision=False))
    shard = checkpoint / "model-00002-of-000002.safetensors"
    tensors = load_file(shard)
    tensors["model.norm.weight"] = tensors["language_model.model.norm.weight"].clone()
    save_file(tensors, shard, metadata={"format": "pt"})
    index = checkpoint / "model.safetensors.index.json"
    content = json.loads(index.read_text())
    content["weight_map"]["model.norm.weight"] = shard.name
    index.write_text(json.dumps(content))
    with pytest.raises(ModelLoadError, match=r"model\.norm\.weight: is the same tensor as"):
        load_runner(checkpoint)


def test_the_files_are_those_of_the_published_checkpoint(tmp_path: Path) -> None:
    checkpoint = write(tmp_path / "int4", "int4", TinyShape(num_layers=2))
    assert {path.name for path in checkpoint.iterdir()} == {
        "config.json",
        "generation_config.json",
        "model-00001-of-000004.safetensors",
        "model-00002-of-000004.safetensors",
        "model-00003-of-000004.safetensors",
        "model-00004-of-000004.safetensors",
        "model.safetensors.index.json",
        "tiktoken.model",
        "tokenizer_config.json",
    }
    index = json.loads((checkpoint / "model.safetensors.index.json").read_text())
    tensors = {file: load_file(checkpoint / file) for file in set(index["weight_map"].values())}
    assert index["weight_map"] == {name: file for file, part in tensors.items() for name in part}
    num_bytes = sum(tensor.nbytes for part in tensors.values() for tensor in part.values())
    assert index["metadata"]["total_size"] == num_bytes
    expert = tensors["model-00002-of-000004.safetensors"]
    packed, scale = expert[f"{EXPERT}_packed"], expert[f"{EXPERT}_scale"]
    assert (packed.dtype, tuple(packed.shape)) == (torch.int32, (128, 8))
    assert (scale.dtype, tuple(scale.shape)) == (torch.bfloat16, (128, 2))
    assert expert[f"{EXPERT}_shape"].tolist() == [128, 64]
    bias = expert["language_model.model.layers.1.mlp.gate.e_score_correction_bias"]
    assert bias.dtype == torch.float32
    assert bias.std() > 0.05


def test_one_seed_makes_one_checkpoint(tmp_path: Path) -> None:
    shape = TinyShape(num_layers=1)
    first, again = (write(tmp_path / name, "int4", shape) for name in ("first", "again"))
    write_tiny_checkpoint(tmp_path / "other", "int4", tiny_ranks(), seed=4, shape=shape)
    shard = "model-00001-of-000003.safetensors"
    assert (first / shard).read_bytes() == (again / shard).read_bytes()
    assert (first / shard).read_bytes() != (tmp_path / "other" / shard).read_bytes()
