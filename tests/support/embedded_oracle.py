"""The embedded model as a plain transformers Llama: what both forms are compared with."""

from __future__ import annotations

from pathlib import Path

import torch
from transformers import LlamaConfig, LlamaForCausalLM

from backend.model.loader import open_model
from backend.model.quant import to_float
from backend.model.weights import WeightReader


def load_oracle(llama_dir: Path) -> LlamaForCausalLM:
    """Dequantise the ``llama`` form into transformers' own model, float32."""
    config, source = open_model(llama_dir)
    reader = WeightReader(source)
    model = LlamaForCausalLM(
        LlamaConfig(
            vocab_size=config.vocab_size,
            hidden_size=config.hidden_size,
            intermediate_size=config.intermediate_size,
            num_hidden_layers=config.num_layers,
            num_attention_heads=config.num_heads,
            num_key_value_heads=config.num_kv_heads,
            head_dim=config.head_dim,
            max_position_embeddings=config.max_position_embeddings,
            rms_norm_eps=config.rms_norm_eps,
            rope_parameters={"rope_type": "default", "rope_theta": config.rope.theta},
            tie_word_embeddings=config.has_tied_head,
            eos_token_id=list(config.eos_token_ids),
            bos_token_id=1,
            pad_token_id=2,
        )
    )
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if parameter.dim() == 2:
                parameter.copy_(to_float(reader.matrix(name, *parameter.shape)))
            else:
                parameter.copy_(reader.vector(name, parameter.shape[0]))
    reader.finish()
    return model.eval()
