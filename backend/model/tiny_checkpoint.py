"""Small random checkpoints in exactly the published forms of Kimi K2.5.

Names, shards, index, configuration, quantisation and vocabulary files are those of the real model; only sizes
differ, and the weights mean nothing. With one seed, the three forms are made from the same numbers.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import torch
from safetensors.torch import save_file
from torch import Tensor

from backend.model.headers import CONFIG, INDEX
from backend.model.kimi_layout import WeightSlot, list_shards
from backend.model.quant_config import FP8_BLOCK
from backend.model.staged import require_room, staged, write_json
from backend.model.stored_forms import store_fp8, store_int4
from backend.text.kimi.tokenizer import VOCABULARY_FILE
from backend.text.kimi.vocabulary import (
    BEGIN_SLOT,
    END_OF_TURN_SLOT,
    MEDIA_SLOT,
    NUM_SLOTS,
    PAD_SLOT,
    tokenizer_config,
    write_ranks,
)

Form = Literal["bf16", "fp8", "int4"]
Progress = Callable[[float, str], None]


@dataclass(frozen=True, slots=True)
class TinyShape:
    """What a tiny model may be told apart by; ``original_positions`` is where YaRN begins to matter."""

    num_layers: int = 4
    hidden: int = 128
    num_heads: int = 4
    q_lora_rank: int = 96
    kv_lora_rank: int = 64
    head_dim: int = 32
    intermediate: int = 256
    num_experts: int = 16
    experts_per_token: int = 4
    expert_dim: int = 64
    num_groups: int = 1
    num_chosen_groups: int = 1
    original_positions: int = 4096
    has_vision: bool = True


def write_tiny_checkpoint(
    out_dir: Path,
    form: Form,
    ranks: Mapping[bytes, int],
    *,
    seed: int = 0,
    shape: TinyShape | None = None,
    progress: Progress = lambda share, doing: None,
) -> None:
    """Write a checkpoint directory; it appears all at once or not at all, and replaces one that is there.

    Args:
        out_dir: the directory.
        form: what matrices are stored as: bf16 all of them, fp8 all but the embedding, the head and the
            router, int4 the routed experts.
        ranks: the ordinary tokens of the vocabulary; the special ones follow them.
        seed: of the weights.
        shape: sizes; the default is right for serving on any machine.
        progress: called with the share done (0 to 1) and what is being done.

    Raises:
        ModelLoadError: when the disk has too little room.
    """
    config = tiny_config(form, shape or TinyShape(), len(ranks))
    shards = list_shards(config)
    random = torch.Generator().manual_seed(seed)
    with staged(out_dir) as staging:
        require_room(staging, 4 * sum(_size(slot) for slots in shards for slot in slots) + 2**22)
        weight_map: dict[str, str] = {}
        total_size = 0
        for number, slots in enumerate(shards, start=1):
            progress(number / (len(shards) + 1), f"writing shard {number} of {len(shards)}")
            file = f"model-{number:05}-of-{len(shards):06}.safetensors"
            tensors: dict[str, Tensor] = {}
            for slot in slots:
                tensors |= _store(slot, _draw(slot, random), form)
            save_file(tensors, staging / file, metadata={"format": "pt"})
            weight_map |= dict.fromkeys(tensors, file)
            total_size += sum(tensor.nbytes for tensor in tensors.values())
        write_json(staging / INDEX, {"metadata": {"total_size": total_size}, "weight_map": weight_map})
        write_json(staging / CONFIG, config)
        generation = {"max_length": 262144, "eos_token_id": config["eos_token_id"]}
        write_json(staging / "generation_config.json", generation)
        write_ranks(staging / VOCABULARY_FILE, ranks)
        write_json(staging / "tokenizer_config.json", tokenizer_config(len(ranks)))
    progress(1.0, "done")


def tiny_config(form: Form, shape: TinyShape, num_ordinary: int) -> dict[str, Any]:
    """The ``config.json``; everything that is not a size is the real model's."""
    ids = {"bos_token_id": BEGIN_SLOT, "eos_token_id": END_OF_TURN_SLOT, "pad_token_id": PAD_SLOT}
    tokens = {name: num_ordinary + slot for name, slot in ids.items()}
    config: dict[str, Any] = {
        "architectures": ["KimiK25ForConditionalGeneration"],
        "model_type": "kimi_k25",
        "dtype": "bfloat16",
        "ignore_index": -100,
        "media_placeholder_token_id": num_ordinary + MEDIA_SLOT,
        "tie_word_embeddings": False,
        "use_unified_vision_chunk": True,
        "video_placeholder": "<|kimi_k25_video_placeholder|>",
        "text_config": _text_config(form, shape, num_ordinary + NUM_SLOTS) | tokens,
        **tokens,
    }
    if shape.has_vision:
        config["vision_config"] = _vision_config(shape)
    return config


def _text_config(form: Form, shape: TinyShape, vocab_size: int) -> dict[str, Any]:
    quant = _quantization_config(form)
    return {
        "architectures": ["DeepseekV3ForCausalLM"],
        "model_type": "kimi_k2",
        "dtype": "bfloat16",
        "vocab_size": vocab_size,
        "hidden_size": shape.hidden,
        "num_hidden_layers": shape.num_layers,
        "num_attention_heads": shape.num_heads,
        "num_key_value_heads": shape.num_heads,
        "q_lora_rank": shape.q_lora_rank,
        "kv_lora_rank": shape.kv_lora_rank,
        "qk_nope_head_dim": shape.head_dim,
        "qk_rope_head_dim": shape.head_dim,
        "v_head_dim": shape.head_dim,
        "attention_bias": False,
        "attention_dropout": 0.0,
        "intermediate_size": shape.intermediate,
        "moe_intermediate_size": shape.expert_dim,
        "n_routed_experts": shape.num_experts,
        "num_experts_per_tok": shape.experts_per_token,
        "n_shared_experts": 1,
        "first_k_dense_replace": 1,
        "moe_layer_freq": 1,
        "n_group": shape.num_groups,
        "topk_group": shape.num_chosen_groups,
        "scoring_func": "sigmoid",
        "topk_method": "noaux_tc",
        "norm_topk_prob": True,
        "routed_scaling_factor": 2.827,
        "hidden_act": "silu",
        "rms_norm_eps": 1e-5,
        "tie_word_embeddings": False,
        "max_position_embeddings": 262144,
        "num_nextn_predict_layers": 0,
        "pretraining_tp": 1,
        "rope_theta": 50000.0,
        "rope_scaling": {
            "type": "yarn",
            "factor": 64.0,
            "original_max_position_embeddings": shape.original_positions,
            "beta_fast": 32.0,
            "beta_slow": 1.0,
            "mscale": 1.0,
            "mscale_all_dim": 1.0,
        },
        **({"quantization_config": quant} if quant else {}),
    }


def _quantization_config(form: Form) -> dict[str, Any] | None:
    if form == "bf16":
        return None
    if form == "fp8":
        return {
            "activation_scheme": "dynamic",
            "fmt": "e4m3",
            "quant_method": "fp8",
            "weight_block_size": [FP8_BLOCK, FP8_BLOCK],
        }
    weights: dict[str, Any] = {
        "actorder": None,
        "block_structure": None,
        "dynamic": False,
        "group_size": 32,
        "num_bits": 4,
        "observer": "minmax",
        "observer_kwargs": {},
        "strategy": "group",
        "symmetric": True,
        "type": "int",
    }
    group = {
        "input_activations": None,
        "output_activations": None,
        "targets": ["Linear"],
        "weights": weights,
    }
    return {
        "config_groups": {"group_0": group},
        "format": "pack-quantized",
        "ignore": [
            "lm_head",
            "re:.*self_attn.*",
            "re:.*shared_experts.*",
            r"re:.*mlp\.(gate|up|gate_up|down)_proj.*",
        ],
        "kv_cache_scheme": None,
        "quant_method": "compressed-tensors",
        "quantization_status": "compressed",
    }


def _vision_config(shape: TinyShape) -> dict[str, Any]:
    hidden = 144  # two heads of 72, the real width of a head
    return {
        "init_pos_emb_height": 64,
        "init_pos_emb_time": 4,
        "init_pos_emb_width": 64,
        "merge_kernel_size": [2, 2],
        "merge_type": "sd2_tpool",
        "mm_hidden_size": hidden,
        "mm_projector_type": "patchmerger",
        "patch_size": 14,
        "pos_emb_type": "divided_fixed",
        "projector_hidden_act": "gelu",
        "projector_ln_eps": 1e-5,
        "text_hidden_size": shape.hidden,
        "video_attn_type": "spatial_temporal",
        "vt_hidden_size": hidden,
        "vt_intermediate_size": 288,
        "vt_num_attention_heads": 2,
        "vt_num_hidden_layers": 2,
    }


def _draw(slot: WeightSlot, random: torch.Generator) -> Tensor:
    """Random numbers that keep activations near one; norms and biases that matter."""
    if slot.role == "norm":
        return torch.rand(slot.shape, generator=random) + 0.5
    if slot.role == "bias":
        return torch.rand(slot.shape, generator=random) * 0.4 - 0.2
    spread = 0.1 if len(slot.shape) == 1 else 1.5 * float(torch.Size(slot.shape[1:]).numel()) ** -0.5
    return torch.randn(slot.shape, generator=random) * spread


def _store(slot: WeightSlot, values: Tensor, form: Form) -> dict[str, Tensor]:
    """The tensors that a checkpoint of ``form`` has for one weight."""
    if slot.role == "bias":
        return {slot.name: values}
    if form == "int4" and slot.role == "expert":
        words, scale = store_int4(values)
        shape = torch.tensor(slot.shape, dtype=torch.int32)
        parts = {"packed": words, "scale": scale, "shape": shape}
        return {f"{slot.name}_{part}": tensor for part, tensor in parts.items()}
    if form == "fp8" and slot.role in ("expert", "linear"):
        weight, scale_inv = store_fp8(values)
        return {slot.name: weight, f"{slot.name}_scale_inv": scale_inv}
    return {slot.name: values.bfloat16()}


def _size(slot: WeightSlot) -> int:
    return int(torch.Size(slot.shape).numel())
