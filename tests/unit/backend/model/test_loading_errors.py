"""A model that cannot be loaded says which file and which tensor or field is wrong."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from backend.model.errors import ModelLoadError, UnsupportedModelError
from backend.model.loader import open_model
from tests.support.tiny_gguf import write_tiny_gguf
from tests.support.tiny_models import write_tiny_kimi, write_tiny_llama

Q_PROJ = "model.layers.1.self_attn.q_proj.weight"


@pytest.fixture
def checkpoint(tmp_path: Path) -> Path:
    write_tiny_llama(tmp_path)
    return tmp_path


def change_tensors(directory: Path, change: Callable[[dict[str, torch.Tensor]], object]) -> None:
    tensors = load_file(directory / "model.safetensors")
    change(tensors)
    save_file(tensors, directory / "model.safetensors", metadata={"format": "pt"})


def change_config(directory: Path, **changes: Any) -> None:
    path = directory / "config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | changes))


def split_into_shards(directory: Path) -> None:
    """The checkpoint in two shards with an index, as large models come."""
    tensors = load_file(directory / "model.safetensors")
    names = sorted(tensors)
    parts = {"model-1.safetensors": names[::2], "model-2.safetensors": names[1::2]}
    for file, part in parts.items():
        save_file({name: tensors[name] for name in part}, directory / file)
    weight_map = {name: file for file, part in parts.items() for name in part}
    (directory / "model.safetensors.index.json").write_text(json.dumps({"weight_map": weight_map}))
    (directory / "model.safetensors").unlink()


def test_a_missing_tensor_is_named(checkpoint: Path, load_runner: Any) -> None:
    change_tensors(checkpoint, lambda tensors: tensors.pop(Q_PROJ))
    with pytest.raises(ModelLoadError, match=rf"{checkpoint}: {Q_PROJ}: missing"):
        load_runner(checkpoint)


def test_a_wrong_shape_is_named_with_its_file(checkpoint: Path, load_runner: Any) -> None:
    change_tensors(checkpoint, lambda tensors: tensors.update({Q_PROJ: torch.zeros(3, 64)}))
    with pytest.raises(
        ModelLoadError, match=rf"model.safetensors: {Q_PROJ}: shape \[3, 64\] must be \[128, 64\]"
    ):
        load_runner(checkpoint)


def test_a_tensor_that_nothing_reads_is_refused(checkpoint: Path, load_runner: Any) -> None:
    bias = "model.layers.0.self_attn.q_proj.bias"
    change_tensors(checkpoint, lambda tensors: tensors.update({bias: torch.zeros(128)}))
    with pytest.raises(UnsupportedModelError, match=f"{bias}: not a tensor of this architecture"):
        load_runner(checkpoint)


def test_an_unsupported_weight_type_is_named(checkpoint: Path, load_runner: Any) -> None:
    weight = torch.zeros((128, 64), dtype=torch.float8_e4m3fn)
    change_tensors(checkpoint, lambda tensors: tensors.update({Q_PROJ: weight}))
    with pytest.raises(UnsupportedModelError, match=rf"{Q_PROJ}: weights of type torch.float8_e4m3fn"):
        load_runner(checkpoint)


def test_shards_load_and_a_missing_one_is_named(checkpoint: Path, load_runner: Any, sequencer: Any) -> None:
    expected = sequencer(load_runner(checkpoint), [3, 4, 5], [0]).compute(0, 3)
    split_into_shards(checkpoint)
    assert torch.equal(sequencer(load_runner(checkpoint), [3, 4, 5], [0]).compute(0, 3), expected)
    (checkpoint / "model-2.safetensors").unlink()
    with pytest.raises(ModelLoadError, match=r"model-2\.safetensors: missing shard"):
        load_runner(checkpoint)


def test_an_index_that_promises_too_much_is_refused(checkpoint: Path, load_runner: Any) -> None:
    split_into_shards(checkpoint)
    index = checkpoint / "model.safetensors.index.json"
    content = json.loads(index.read_text())
    content["weight_map"]["model.extra.weight"] = "model-1.safetensors"
    index.write_text(json.dumps(content))
    with pytest.raises(ModelLoadError, match=r"model-1\.safetensors: model\.extra\.weight: missing"):
        load_runner(checkpoint)


def test_an_index_cannot_name_a_file_elsewhere(checkpoint: Path, load_runner: Any) -> None:
    split_into_shards(checkpoint)
    index = checkpoint / "model.safetensors.index.json"
    index.write_text(json.dumps({"weight_map": {"a": "../outside.safetensors"}}))
    with pytest.raises(ModelLoadError, match="is not a file name"):
        load_runner(checkpoint)


def test_a_damaged_shard_is_named(checkpoint: Path, load_runner: Any) -> None:
    (checkpoint / "model.safetensors").write_bytes(b"\x08\0\0\0\0\0\0\0{nonsens")
    with pytest.raises(ModelLoadError, match=r"model\.safetensors: not a readable safetensors file"):
        load_runner(checkpoint)


def test_a_directory_without_weights_or_config_is_named(tmp_path: Path) -> None:
    with pytest.raises(ModelLoadError, match=r"config\.json: missing"):
        open_model(tmp_path)
    with pytest.raises(ModelLoadError, match="there is no model there"):
        open_model(tmp_path / "absent")
    (tmp_path / "model.bin").write_bytes(b"")
    with pytest.raises(ModelLoadError, match=r"neither a model directory nor a \.gguf file"):
        open_model(tmp_path / "model.bin")


@pytest.mark.parametrize(
    ("changes", "complaint"),
    [
        ({"model_type": "qwen3"}, "model_type: 'qwen3' is not supported"),
        ({"hidden_act": "gelu"}, "hidden_act: 'gelu' is not supported"),
        ({"attention_bias": True}, "attention_bias: True is not supported"),
        ({"mlp_bias": True}, "mlp_bias: True is not supported"),
        ({"sliding_window": 4096}, "sliding_window: unknown"),
        ({"kv_lora_rank": 64}, "kv_lora_rank: unknown"),
        ({"rope_interleaved": True}, "rope_interleaved: True is not supported"),
        ({"hidden_size": "64"}, "hidden_size: '64' must be an integer"),
        ({"num_hidden_layers": 0}, "num_hidden_layers: 0 must be an integer of at least 1"),
        ({"rms_norm_eps": None}, "rms_norm_eps: missing"),
        ({"num_key_value_heads": 3}, "num_key_value_heads: 3 does not divide 4"),
        (
            {"rope_parameters": {"rope_type": "llama3"}},
            "rope_parameters.rope_type: 'llama3' is not supported",
        ),
        ({"rope_parameters": {"rope_type": "yarn"}}, "rope_parameters.factor: missing"),
        (
            {"rope_parameters": {"rope_type": "default", "partial_rotary_factor": 0.5}},
            "rope_parameters.partial_rotary_factor: 0.5 is not supported, only 1.0",
        ),
        (
            {"rope_parameters": {"rope_type": "default", "llama_4_scaling_beta": 0.1}},
            "rope_parameters.llama_4_scaling_beta: unknown",
        ),
        (
            {"quantization_config": {"quant_method": "awq"}},
            "quantization_config.quant_method: 'awq' is not supported",
        ),
        ({"vision_config": {}}, "model_type: 'llama' with a vision tower"),
        ({"embergate": {"format": 2}}, "embergate.format: 2 is not supported"),
        ({"embergate": {"tiles": 3}}, "embergate.tiles: unknown"),
        ({"tie_word_embeddings": "yes"}, "tie_word_embeddings: 'yes' must be true or false"),
    ],
)
def test_a_field_that_cannot_be_honoured_is_named(
    checkpoint: Path, changes: dict[str, Any], complaint: str
) -> None:
    change_config(checkpoint, **changes)
    with pytest.raises(ModelLoadError) as caught:
        open_model(checkpoint)
    assert str(caught.value).startswith(f"{checkpoint}/config.json: {complaint}")


def test_fields_of_published_llamas_that_change_nothing_are_no_obstacle(checkpoint: Path) -> None:
    published = {"is_llama_config": True, "rope_interleaved": False, "attention_dropout": 0.1}
    bookkeeping = {"transformers.js_config": {"kv_cache_dtype": {"q4f16": "float16"}}, "use_cache": False}
    before, _ = open_model(checkpoint)
    change_config(checkpoint, **published, **bookkeeping)
    after, _ = open_model(checkpoint)
    assert after == before


@pytest.mark.parametrize(
    ("changes", "complaint"),
    [
        ({"scoring_func": "softmax"}, "scoring_func: 'softmax' is not supported"),
        ({"topk_method": "greedy"}, "topk_method: 'greedy' is not supported"),
        ({"moe_layer_freq": 2}, "moe_layer_freq: 2 is not supported"),
        ({"n_group": 3}, "n_group: 3 does not divide 8"),
        ({"n_group": 4, "num_experts_per_tok": 3}, "num_experts_per_tok: 3 is more than 1 groups hold"),
        ({"embergate": {"identity": ["q_b_proj"]}}, "embergate.identity: 'q_b_proj' is not one of"),
        ({"embergate": {"identity": ["q_a_proj"]}}, "embergate.identity: q_a_proj and q_a_layernorm"),
        ({"embergate": {"identity": ["kv_a_proj_latent"]}, "kv_lora_rank": 32}, "kv_lora_rank: 32 must be"),
        ({"embergate": {"rope_groups": 3}}, "embergate.rope_groups: 3 does not divide 4"),
    ],
)
def test_a_field_of_the_kimi_family_is_named(tmp_path: Path, changes: dict[str, Any], complaint: str) -> None:
    write_tiny_kimi(tmp_path)
    change_config(tmp_path, **changes)
    with pytest.raises(ModelLoadError) as caught:
        open_model(tmp_path)
    assert str(caught.value).startswith(f"{tmp_path}/config.json: {complaint}")


def test_gguf_files_that_cannot_be_used_are_named(tmp_path: Path) -> None:
    damaged = tmp_path / "damaged.gguf"
    damaged.write_bytes(b"not a gguf file")
    with pytest.raises(ModelLoadError, match=r"damaged\.gguf: not a readable GGUF file"):
        open_model(damaged)
    experts = tmp_path / "experts.gguf"
    write_tiny_gguf(experts, **{"llama.expert_count": 4})
    with pytest.raises(UnsupportedModelError, match=r"experts\.gguf: llama\.expert_count: 4"):
        open_model(experts)


def test_packed_weights_of_a_shape_without_kernels_fall_back_or_say_why(
    tmp_path: Path, load_runner: Any
) -> None:
    write_tiny_llama(tmp_path, head_dim=16)
    assert not load_runner(tmp_path).info.is_native
    with pytest.raises(ModelLoadError, match="'packed' is not possible: head_dim 16 is not a multiple of 32"):
        load_runner(tmp_path, weights="packed")
