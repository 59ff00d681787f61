"""Tiny random checkpoints of both families, written in the official form by transformers itself."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from transformers import (
    DeepseekV3Config,
    DeepseekV3ForCausalLM,
    LlamaConfig,
    LlamaForCausalLM,
    PreTrainedModel,
)

KIMI_YARN = {
    "rope_type": "yarn",
    "rope_theta": 50000.0,
    "factor": 64.0,
    "original_max_position_embeddings": 64,
    "beta_fast": 32.0,
    "beta_slow": 1.0,
    "mscale": 1.0,
    "mscale_all_dim": 1.0,
}


def write_tiny_llama(directory: Path, *, seed: int = 0, **changes: Any) -> PreTrainedModel:
    """Write a 2-layer llama (hidden 64, 4 heads on 2 KV heads); returns the reference model."""
    fields: dict[str, Any] = {
        "hidden_size": 64,
        "intermediate_size": 96,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "head_dim": 32,
        "vocab_size": 256,
        "max_position_embeddings": 512,
        "rms_norm_eps": 1e-5,
        "tie_word_embeddings": False,
        "bos_token_id": 1,
        "eos_token_id": 2,
    }
    torch.manual_seed(seed)
    return _save(LlamaForCausalLM(LlamaConfig(**fields | changes)), directory)


def write_tiny_kimi(directory: Path, *, seed: int = 0, **changes: Any) -> PreTrainedModel:
    """Write a 3-layer DeepSeek-V3 in Kimi's manner (8 experts, top 3, YaRN); returns the reference model."""
    fields: dict[str, Any] = {
        "hidden_size": 64,
        "intermediate_size": 96,
        "moe_intermediate_size": 32,
        "num_hidden_layers": 3,
        "num_attention_heads": 4,
        "num_key_value_heads": 4,
        "q_lora_rank": 96,
        "kv_lora_rank": 64,
        "qk_nope_head_dim": 32,
        "qk_rope_head_dim": 32,
        "v_head_dim": 32,
        "n_routed_experts": 8,
        "num_experts_per_tok": 3,
        "n_shared_experts": 1,
        "n_group": 1,
        "topk_group": 1,
        "first_k_dense_replace": 1,
        "norm_topk_prob": True,
        "routed_scaling_factor": 2.827,
        "vocab_size": 256,
        "max_position_embeddings": 4096,
        "rms_norm_eps": 1e-5,
        "rope_parameters": KIMI_YARN,
        "num_nextn_predict_layers": 0,
        "bos_token_id": 1,
        "eos_token_id": 2,
        "tie_word_embeddings": False,
    }
    torch.manual_seed(seed)
    model = DeepseekV3ForCausalLM(DeepseekV3Config(**fields | changes))
    for layer in model.model.layers:
        if hasattr(layer.mlp, "gate"):
            # With a bias of zeros the choice of experts would not be told from plain top-k.
            layer.mlp.gate.e_score_correction_bias.uniform_(-0.2, 0.2)
            torch.nn.init.normal_(layer.mlp.gate.weight, std=0.5)
    return _save(model, directory)


def _save(model: PreTrainedModel, directory: Path) -> PreTrainedModel:
    # Norm weights of ones would hide a norm that is applied twice or to the wrong vector.
    for name, parameter in model.named_parameters():
        if "norm" in name:
            torch.nn.init.uniform_(parameter, 0.5, 1.5)
        elif parameter.dim() == 2:
            torch.nn.init.normal_(parameter, std=0.15) if "gate.weight" not in name else None
    model.eval()
    model.save_pretrained(directory)
    return model
