"""Which tensors a Kimi K2.5 checkpoint holds, under which names, in which shard.

The names and the division into shards are those of the published checkpoint: one layer to a shard, then the
embedding with the head and the final norm, then the vision tower with the projector.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any, Literal

Role = Literal["expert", "linear", "plain", "norm", "bias", "router"]

_TEXT = "language_model"


@dataclass(frozen=True, slots=True)
class WeightSlot:
    """One weight. ``expert``: a routed expert's matrix. ``linear``: another matrix that fp8 checkpoints
    quantise. ``plain``: a matrix that none does."""

    name: str
    shape: tuple[int, ...]
    role: Role


def list_shards(config: Mapping[str, Any]) -> list[list[WeightSlot]]:
    """The weights of each shard, in order.

    Args:
        config: a decoded ``config.json`` of model type ``kimi_k25``; without a ``vision_config`` there is no
            shard for the vision tower.
    """
    text = config["text_config"]
    shards = [list(_layer(text, layer)) for layer in range(text["num_hidden_layers"])]
    embedding = (text["vocab_size"], text["hidden_size"])
    shards.append(
        [
            WeightSlot(f"{_TEXT}.model.embed_tokens.weight", embedding, "plain"),
            WeightSlot(f"{_TEXT}.model.norm.weight", (text["hidden_size"],), "norm"),
            WeightSlot(f"{_TEXT}.lm_head.weight", embedding, "plain"),
        ]
    )
    if config.get("vision_config"):
        vision = config["vision_config"]
        shards.append([*_vision_tower(vision), *_projector(vision, text["hidden_size"])])
    return shards


def _layer(text: Mapping[str, Any], layer: int) -> Iterator[WeightSlot]:
    prefix, hidden = f"{_TEXT}.model.layers.{layer}", text["hidden_size"]
    for norm in ("input_layernorm", "post_attention_layernorm"):
        yield WeightSlot(f"{prefix}.{norm}.weight", (hidden,), "norm")
    yield from _attention(text, f"{prefix}.self_attn")
    if layer < text["first_k_dense_replace"]:
        yield from _swiglu(f"{prefix}.mlp", hidden, text["intermediate_size"], "linear")
        return
    experts, width = text["n_routed_experts"], text["moe_intermediate_size"]
    yield WeightSlot(f"{prefix}.mlp.gate.weight", (experts, hidden), "router")
    yield WeightSlot(f"{prefix}.mlp.gate.e_score_correction_bias", (experts,), "bias")
    shared = text["n_shared_experts"] * width
    if shared:
        yield from _swiglu(f"{prefix}.mlp.shared_experts", hidden, shared, "linear")
    for expert in range(experts):
        yield from _swiglu(f"{prefix}.mlp.experts.{expert}", hidden, width, "expert")


def _attention(text: Mapping[str, Any], prefix: str) -> Iterator[WeightSlot]:
    hidden, heads = text["hidden_size"], text["num_attention_heads"]
    q_rank, kv_rank = text["q_lora_rank"], text["kv_lora_rank"]
    nope, rope, value = text["qk_nope_head_dim"], text["qk_rope_head_dim"], text["v_head_dim"]
    matrices = {
        "q_a_proj": (q_rank, hidden),
        "q_b_proj": (heads * (nope + rope), q_rank),
        "kv_a_proj_with_mqa": (kv_rank + rope, hidden),
        "kv_b_proj": (heads * (nope + value), kv_rank),
        "o_proj": (hidden, heads * value),
    }
    for name, shape in matrices.items():
        yield WeightSlot(f"{prefix}.{name}.weight", shape, "linear")
    yield WeightSlot(f"{prefix}.q_a_layernorm.weight", (q_rank,), "norm")
    yield WeightSlot(f"{prefix}.kv_a_layernorm.weight", (kv_rank,), "norm")


def _swiglu(prefix: str, hidden: int, width: int, role: Role) -> Iterator[WeightSlot]:
    for part, shape in (("gate", (width, hidden)), ("up", (width, hidden)), ("down", (hidden, width))):
        yield WeightSlot(f"{prefix}.{part}_proj.weight", shape, role)


def _vision_tower(vision: Mapping[str, Any]) -> Iterator[WeightSlot]:
    prefix, hidden, patch = "vision_tower", vision["vt_hidden_size"], vision["patch_size"]
    yield from _affine(f"{prefix}.patch_embed.proj", (hidden, 3, patch, patch))
    grid = (vision["init_pos_emb_height"], vision["init_pos_emb_width"], hidden)
    yield WeightSlot(f"{prefix}.patch_embed.pos_emb.weight", grid, "plain")
    for block in range(vision["vt_num_hidden_layers"]):
        inner = f"{prefix}.encoder.blocks.{block}"
        for norm in ("norm0", "norm1"):
            yield from _layer_norm(f"{inner}.{norm}", hidden)
        yield from _affine(f"{inner}.wqkv", (3 * hidden, hidden))
        yield from _affine(f"{inner}.wo", (hidden, hidden))
        yield from _affine(f"{inner}.mlp.fc0", (vision["vt_intermediate_size"], hidden))
        yield from _affine(f"{inner}.mlp.fc1", (hidden, vision["vt_intermediate_size"]))
    yield from _layer_norm(f"{prefix}.encoder.final_layernorm", hidden)


def _projector(vision: Mapping[str, Any], text_hidden: int) -> Iterator[WeightSlot]:
    high, wide = vision["merge_kernel_size"]
    merged = vision["mm_hidden_size"] * high * wide
    yield from _layer_norm("mm_projector.pre_norm", vision["mm_hidden_size"])
    yield from _affine("mm_projector.proj.0", (merged, merged))
    yield from _affine("mm_projector.proj.2", (text_hidden, merged))


def _affine(prefix: str, shape: tuple[int, ...]) -> Iterator[WeightSlot]:
    yield WeightSlot(f"{prefix}.weight", shape, "plain")
    yield WeightSlot(f"{prefix}.bias", shape[:1], "plain")


def _layer_norm(prefix: str, width: int) -> Iterator[WeightSlot]:
    yield WeightSlot(f"{prefix}.weight", (width,), "norm")
    yield WeightSlot(f"{prefix}.bias", (width,), "plain")
