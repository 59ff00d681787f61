"""Kimi K2.5's configuration: the published one is understood, and what cannot be honoured is named."""

from __future__ import annotations

import copy
import json
from collections.abc import Callable
from typing import Any

import pytest

from backend.model.config import parse_config
from backend.model.errors import ModelLoadError
from backend.model.quant_config import QuantConfig
from backend.model.tiny_checkpoint import Form, TinyShape, tiny_config
from tests.support.shared_data import shared_data

Fields = dict[str, Any]


def text(fields: Fields) -> Fields:
    inner: Fields = fields["text_config"]
    return inner


def quant(fields: Fields) -> Fields:
    inner: Fields = text(fields)["quantization_config"]
    return inner


def group(fields: Fields) -> Fields:
    inner: Fields = quant(fields)["config_groups"]["group_0"]
    return inner


def test_the_published_configuration_is_understood() -> None:
    raw = json.loads((shared_data("kimi-tokenizer") / "config.json").read_text())
    config = parse_config(raw, "config.json")
    assert config.family == "deepseek_v3"
    assert config.vision is not None
    assert config.vision.out_size == config.hidden_size
    assert config.quant == QuantConfig("compressed-tensors", group_size=32, bits=4)
    assert config.softmax_scale == pytest.approx(0.144680, abs=5e-7)
    assert config.rope.yarn is not None
    assert config.rope.yarn.cos_sin_factor == 1.0
    assert config.num_layers * config.kv_row_width * 2 == 70_272
    assert config.eos_token_ids == (163586,)
    assert config.mla is not None
    assert config.mla.latent_norm_eps == 1e-6


def test_a_tiny_configuration_differs_from_the_published_one_in_sizes_and_bookkeeping_only() -> None:
    real = json.loads((shared_data("kimi-tokenizer") / "config.json").read_text())
    tiny = tiny_config("int4", TinyShape(), 163584)
    assert tiny.keys() == real.keys() - {"auto_map"}
    assert text(tiny).keys() <= text(real).keys()
    assert quant(tiny) == quant(real)
    assert text(tiny)["rope_scaling"] == text(real)["rope_scaling"]
    differing = {name for name, value in text(tiny).items() if text(real)[name] != value}
    sizes = {
        "hidden_size", "intermediate_size", "kv_lora_rank", "moe_intermediate_size", "n_routed_experts",
        "num_attention_heads", "num_experts_per_tok", "num_hidden_layers", "num_key_value_heads",
        "q_lora_rank", "qk_nope_head_dim", "qk_rope_head_dim", "v_head_dim",
    }  # fmt: skip
    assert differing == sizes
    kept = ("bos_token_id", "eos_token_id", "pad_token_id", "media_placeholder_token_id")
    assert [tiny[name] for name in kept] == [real[name] for name in kept]


@pytest.mark.parametrize(
    ("form", "expected"),
    [
        ("bf16", None),
        ("fp8", QuantConfig("fp8", group_size=128, bits=8)),
        ("int4", QuantConfig("compressed-tensors", group_size=32, bits=4)),
    ],
)
def test_each_form_says_what_it_is(form: Form, expected: QuantConfig | None) -> None:
    assert parse_config(tiny_config(form, TinyShape(), 300), "config.json").quant == expected


def test_a_quantisation_may_stand_outside_but_not_twice() -> None:
    fields = tiny_config("int4", TinyShape(), 300)
    fields["quantization_config"] = text(fields).pop("quantization_config")
    assert parse_config(fields, "config.json").quant is not None
    text(fields)["quantization_config"] = fields["quantization_config"]
    with pytest.raises(ModelLoadError, match="quantization_config: stands in text_config too"):
        parse_config(fields, "config.json")


Change = Callable[[Fields], object]


@pytest.mark.parametrize(
    ("change", "complaint"),
    [
        (lambda f: f.update(text_config={}), "text_config: missing"),
        (lambda f: f.update(text_config=[1]), "text_config: must be an object"),
        (lambda f: f.update(image_size=1), "image_size: unknown"),
        (lambda f: f.update(tie_word_embeddings=True), "tie_word_embeddings: True is not supported"),
        (lambda f: text(f).update(model_type="llama"), "text_config.model_type: 'llama' is not supported"),
        (lambda f: text(f).update(sliding_window=128), "text_config.sliding_window: unknown"),
        (lambda f: text(f).update(num_experts_per_tok=99), "text_config.num_experts_per_tok: 99 is more"),
        (lambda f: text(f).update(topk_group=2), "text_config.topk_group: 2 is more than the 1 groups"),
        (
            lambda f: text(f).update(rms_norm_eps=float("nan")),
            "text_config.rms_norm_eps: nan must be a number",
        ),
        (lambda f: text(f).update(rms_norm_eps=-1.0), "text_config.rms_norm_eps: -1.0 must be at least 0"),
        (lambda f: f.update(eos_token_id="x"), "text_config.eos_token_id: 'x' is not the id of a token"),
        (lambda f: f.update(eos_token_id=["x"]), "text_config.eos_token_id: 'x' is not the id of a token"),
        (lambda f: f.update(use_unified_vision_chunk=False), "use_unified_vision_chunk: False is not"),
        (
            lambda f: text(f)["rope_scaling"].update(factor=0.0),
            "text_config.rope_scaling.factor: 0.0 must be at least 1",
        ),
        (
            lambda f: quant(f).update(quant_method="gptq"),
            "text_config.quantization_config.quant_method: 'gptq' is not supported",
        ),
        (
            lambda f: quant(f).update(format="int-quantized"),
            "text_config.quantization_config.format: 'int-quantized' is not supported",
        ),
        (
            lambda f: quant(f).update(kv_cache_scheme={"num_bits": 8}),
            "text_config.quantization_config.kv_cache_scheme: {'num_bits': 8} is not supported",
        ),
        (
            lambda f: quant(f).update(sparsity_config={"format": "2:4"}),
            "text_config.quantization_config.sparsity_config: only an empty one",
        ),
        (lambda f: quant(f).update(rotation="r1"), "text_config.quantization_config.rotation: unknown"),
        (
            lambda f: quant(f)["config_groups"].update(group_1={}),
            "text_config.quantization_config.config_groups: 2 groups are not supported",
        ),
        (
            lambda f: group(f).update(input_activations={"num_bits": 8}),
            "text_config.quantization_config.config_groups.group_0.input_activations: {'num_bits': 8} is not",
        ),
        *(
            (
                lambda f, name=name, value=value: group(f)["weights"].update({name: value}),
                f"text_config.quantization_config.config_groups.group_0.weights.{name}: {value!r} is not",
            )
            for name, value in {
                "num_bits": 8,
                "group_size": 128,
                "symmetric": False,
                "actorder": "group",
                "strategy": "channel",
                "type": "float",
                "dynamic": True,
            }.items()
        ),
        (
            lambda f: group(f)["weights"].update(hadamard=True),
            "text_config.quantization_config.config_groups.group_0.weights.hadamard: unknown",
        ),
    ],
)
def test_a_field_that_cannot_be_honoured_is_named(change: Change, complaint: str) -> None:
    fields = copy.deepcopy(tiny_config("int4", TinyShape(), 300))
    change(fields)
    with pytest.raises(ModelLoadError) as caught:
        parse_config(fields, "config.json")
    assert str(caught.value).startswith(f"config.json: {complaint}")


@pytest.mark.parametrize(
    ("changes", "complaint"),
    [
        ({"activation_scheme": "static"}, "activation_scheme: 'static' is not supported"),
        ({"fmt": "e5m2"}, "fmt: 'e5m2' is not supported"),
        ({"weight_block_size": [64, 64]}, "weight_block_size: [64, 64] is not supported"),
        ({"weight_block_size": None}, "weight_block_size: None is not supported"),
        ({"modules": []}, "modules: unknown"),
    ],
)
def test_a_field_of_fp8_is_named(changes: Fields, complaint: str) -> None:
    fields = tiny_config("fp8", TinyShape(), 300)
    quant(fields).update(changes)
    with pytest.raises(ModelLoadError) as caught:
        parse_config(fields, "config.json")
    assert str(caught.value).startswith(f"config.json: text_config.quantization_config.{complaint}")
