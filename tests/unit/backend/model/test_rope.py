"""The rotary table: plain, and YaRN with Kimi K2.5's own figures."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from transformers import DeepseekV3Config
from transformers.models.deepseek_v3.modeling_deepseek_v3 import DeepseekV3RotaryEmbedding

from backend.model.config import ModelConfig, RopeConfig, parse_config
from backend.model.rope import build_rope_table, inverse_frequencies

KIMI_K25 = {
    "model_type": "kimi_k2",
    "hidden_size": 7168,
    "num_hidden_layers": 61,
    "num_attention_heads": 64,
    "q_lora_rank": 1536,
    "kv_lora_rank": 512,
    "qk_nope_head_dim": 128,
    "qk_rope_head_dim": 64,
    "v_head_dim": 128,
    "intermediate_size": 18432,
    "moe_intermediate_size": 2048,
    "n_routed_experts": 384,
    "num_experts_per_tok": 8,
    "n_shared_experts": 1,
    "first_k_dense_replace": 1,
    "routed_scaling_factor": 2.827,
    "rms_norm_eps": 1e-5,
    "vocab_size": 163840,
    "max_position_embeddings": 262144,
    "rope_theta": 50000.0,
    "rope_scaling": {
        "type": "yarn",
        "factor": 64.0,
        "original_max_position_embeddings": 4096,
        "beta_fast": 32.0,
        "beta_slow": 1.0,
        "mscale": 1.0,
        "mscale_all_dim": 1.0,
    },
    "eos_token_id": 163586,
}


@pytest.fixture
def kimi() -> ModelConfig:
    return parse_config(KIMI_K25, str(Path("config.json")))


def test_kimis_derived_constants(kimi: ModelConfig) -> None:
    assert kimi.softmax_scale == pytest.approx(0.144680, abs=1e-6)
    assert kimi.rope.yarn is not None
    assert kimi.rope.yarn.cos_sin_factor == 1.0
    assert kimi.kv_row_width * kimi.num_layers == 35_136
    assert kimi.mla is not None
    assert kimi.mla.latent_norm_eps == 1e-6
    assert kimi.rms_norm_eps == 1e-5
    assert kimi.eos_token_ids == (163586,)


def test_yarn_frequencies_equal_transformers(kimi: ModelConfig) -> None:
    reference = DeepseekV3RotaryEmbedding(
        DeepseekV3Config(
            qk_rope_head_dim=64,
            max_position_embeddings=262144,
            rope_parameters={**KIMI_K25["rope_scaling"], "rope_type": "yarn", "rope_theta": 50000.0},  # type: ignore[dict-item]
        )
    )
    torch.testing.assert_close(inverse_frequencies(kimi.rope), reference.inv_freq, rtol=1e-6, atol=0)


def test_angles_at_the_far_end_are_the_models_own_not_exact_ones(kimi: ModelConfig) -> None:
    """See docs/decisions/0510-rotary-angles-in-float32.md."""
    reference = DeepseekV3RotaryEmbedding(
        DeepseekV3Config(
            qk_rope_head_dim=64,
            max_position_embeddings=262144,
            rope_parameters={**KIMI_K25["rope_scaling"], "rope_type": "yarn", "rope_theta": 50000.0},  # type: ignore[dict-item]
        )
    )
    last = torch.arange(262_144 - 64, 262_144)
    cos, sin = build_rope_table(kimi.rope, 262_144, torch.device("cpu")).at(last)
    expected_cos, expected_sin = reference(torch.zeros(1), last[None])
    torch.testing.assert_close(cos, expected_cos[0, :, :32], rtol=0, atol=1e-6)
    torch.testing.assert_close(sin, expected_sin[0, :, :32], rtol=0, atol=1e-6)
    exact = torch.outer(last.double(), inverse_frequencies(kimi.rope).double()).cos()
    assert (cos.double() - exact).abs().max() > 1e-3


def test_the_table_holds_cosines_of_position_times_frequency() -> None:
    table = build_rope_table(RopeConfig(dim=4, theta=100.0, is_interleaved=True), 8, torch.device("cpu"))
    cos, sin = table.at(torch.tensor([0, 7]))
    torch.testing.assert_close(cos, torch.tensor([[0.0, 0.0], [7.0, 0.7]]).cos())
    torch.testing.assert_close(sin, torch.tensor([[0.0, 0.0], [7.0, 0.7]]).sin())
