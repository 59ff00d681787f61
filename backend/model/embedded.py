"""The embedded model: a dense llama GGUF written as a checkpoint, plain or in Kimi K2.5's shape.

The ``kimi`` form is the same function. Each rewriting is exact, up to the rounding of float32 sums:

attention
    MLA whose latent is the normalised hidden state itself: the query and latent down-projections and their
    norms are identities, which the checkpoint declares and does not store. ``W_UV`` of a head is ``W_V`` of
    its KV head. There is no part of the key without rotation; the rope key holds the KV heads side by side,
    all rotated by one table (``rope_groups``), and a query head reads its own KV head's columns.
feed-forward
    SwiGLU is a sum over neurons, so it may be cut into experts at will: a quarter of the neurons become the
    shared experts, the rest twelve routed experts. All twelve are chosen; gate weights are so small that
    every sigmoid is one half to within 1e-7, hence every combine weight is one to within 1e-6, while the
    order of the experts still comes from gate and bias. Layer 0 stays dense.

Matrices keep the integers, scales and minima of their GGUF blocks (:mod:`backend.model.quant`), so that
neither form loses anything.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, Literal

import torch
from safetensors.torch import save_file
from torch import Tensor

from backend.model.config import EXTENSION_FORMAT, ModelConfig
from backend.model.errors import UnsupportedModelError
from backend.model.gguf_file import GgufFile
from backend.model.headers import CONFIG
from backend.model.quant import GROUP_SIZE, AffineBlocks, Matrix, select_rows, to_float
from backend.model.staged import require_room, staged, write_json
from backend.text.gguf_tokenizer import build_tokenizer, build_tokenizer_config

Form = Literal["kimi", "llama"]
Progress = Callable[[float, str], None]

_NUM_EXPERTS = 12
_NUM_SHARED = 4
_GATE_SCALE = 5e-9
"""Of gate weights: keeps a sigmoid within one unit in the last place of one half for any hidden state."""


def write_checkpoint(gguf_path: Path, out_dir: Path, form: Form, progress: Progress) -> None:
    """Write the model directory (config, safetensors, tokenizer); it appears all at once or not at all.

    Args:
        gguf_path: a llama GGUF in Q4_0, Q4_1, Q8_0, F16 or F32.
        out_dir: replaced when it exists.
        form: see the module.
        progress: called with the share done (0 to 1) and what is being done.

    Raises:
        ModelLoadError: when the file is not usable or the disk has too little room.
    """
    progress(0.0, "reading the GGUF file")
    source = GgufFile(gguf_path)
    with staged(out_dir) as staging:
        require_room(staging, gguf_path.stat().st_size * 5 // 4 + 2**24)
        _write_files(source, staging, form, progress)
    progress(1.0, "done")


def _write_files(source: GgufFile, directory: Path, form: Form, progress: Progress) -> None:
    tensors: dict[str, Tensor] = {}
    rewrite = _kimi_weights if form == "kimi" else _llama_weights
    total = source.config.num_layers + 1
    for name, matrix in rewrite(source):
        tensors.update(_stored(name, matrix))
        if name.endswith("input_layernorm.weight"):
            layer = int(name.split(".")[2])
            progress(0.8 * layer / total, f"rewriting layer {layer + 1} of {source.config.num_layers}")
    progress(0.8, "writing the checkpoint")
    save_file(tensors, directory / "model.safetensors", metadata={"format": "pt"})
    progress(0.95, "writing the tokenizer")
    fields = _kimi_config(source.config) if form == "kimi" else _llama_config(source.config)
    write_json(directory / CONFIG, fields | _shared_config(source, form))
    write_json(directory / "generation_config.json", _generation_config(source))
    write_json(directory / "tokenizer_config.json", build_tokenizer_config(source.fields))
    build_tokenizer(source.fields).save(str(directory / "tokenizer.json"))


def _stored(name: str, matrix: Matrix) -> dict[str, Tensor]:
    if isinstance(matrix, AffineBlocks):
        parts = {"packed": matrix.packed, "scale": matrix.scale, "min": matrix.minimum}
        return {f"{name}_{part}": tensor.contiguous() for part, tensor in parts.items()}
    return {name: matrix.contiguous()}


def _llama_weights(source: GgufFile) -> Iterator[tuple[str, Matrix]]:
    for name in source.weight_names:
        yield name, source.matrix(name)


def _kimi_weights(source: GgufFile) -> Iterator[tuple[str, Matrix]]:
    config = source.config
    for name in source.weight_names:
        if not name.startswith("model.layers."):
            yield name, source.matrix(name)
    for layer in range(config.num_layers):
        prefix = f"model.layers.{layer}"
        for norm in ("input_layernorm", "post_attention_layernorm"):
            yield f"{prefix}.{norm}.weight", source.matrix(f"{prefix}.{norm}.weight")
        yield from _kimi_attention(source, f"{prefix}.self_attn")
        mlp = {part: source.matrix(f"{prefix}.mlp.{part}_proj.weight") for part in ("gate", "up", "down")}
        if layer == 0:
            yield from _named(f"{prefix}.mlp", mlp)
        else:
            yield from _kimi_experts(mlp, f"{prefix}.mlp")


def _kimi_attention(source: GgufFile, prefix: str) -> Iterator[tuple[str, Matrix]]:
    config = source.config
    # The file's own order has rotary pairs side by side, which is this family's.
    yield f"{prefix}.q_b_proj.weight", source.stored(f"{prefix}.q_proj.weight")
    yield f"{prefix}.kv_a_proj_with_mqa.weight", source.stored(f"{prefix}.k_proj.weight")
    value_rows = torch.arange(config.num_kv_heads * config.head_dim).view(config.num_kv_heads, 1, -1)
    per_head = value_rows.expand(-1, config.num_heads // config.num_kv_heads, -1).reshape(-1)
    yield f"{prefix}.kv_b_proj.weight", select_rows(source.stored(f"{prefix}.v_proj.weight"), per_head)
    yield f"{prefix}.o_proj.weight", source.stored(f"{prefix}.o_proj.weight")


def _kimi_experts(mlp: dict[str, Matrix], prefix: str) -> Iterator[tuple[str, Matrix]]:
    neurons = mlp["gate"].shape[0]
    width = neurons // (_NUM_EXPERTS + _NUM_SHARED)
    shared = width * _NUM_SHARED
    yield from _named(f"{prefix}.shared_experts", _neurons(mlp, 0, shared))
    gates, energies = [], []
    for expert in range(_NUM_EXPERTS):
        start = shared + expert * width
        parts = _neurons(mlp, start, start + width)
        yield from _named(f"{prefix}.experts.{expert}", parts)
        direction = to_float(parts["gate"]).mean(0)
        gates.append(direction / direction.norm())
        energies.append(to_float(parts["down"]).square().sum())
    energy = torch.stack(energies)
    yield f"{prefix}.gate.weight", torch.stack(gates) * _GATE_SCALE
    yield f"{prefix}.gate.e_score_correction_bias", 0.01 * energy / energy.max()


def _named(prefix: str, mlp: dict[str, Matrix]) -> Iterator[tuple[str, Matrix]]:
    for part, matrix in mlp.items():
        yield f"{prefix}.{part}_proj.weight", matrix


def _neurons(mlp: dict[str, Matrix], start: int, end: int) -> dict[str, Matrix]:
    """The feed-forward layer of neurons ``start .. end - 1``: rows of gate and up, columns of down."""
    rows, down = torch.arange(start, end), mlp["down"]
    return {
        "gate": select_rows(mlp["gate"], rows),
        "up": select_rows(mlp["up"], rows),
        "down": down.select_columns(start, end) if isinstance(down, AffineBlocks) else down[:, start:end],
    }


def _llama_config(config: ModelConfig) -> dict[str, Any]:
    return {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "num_key_value_heads": config.num_kv_heads,
        "head_dim": config.head_dim,
    }


def _kimi_config(config: ModelConfig) -> dict[str, Any]:
    width, rest = divmod(config.intermediate_size, _NUM_EXPERTS + _NUM_SHARED)
    if rest or width % GROUP_SIZE:
        raise UnsupportedModelError(
            f"feed_forward_length: {config.intermediate_size} cannot be cut into"
            f" {_NUM_EXPERTS + _NUM_SHARED} experts of whole groups of {GROUP_SIZE}"
        )
    return {
        "architectures": ["DeepseekV3ForCausalLM"],
        "model_type": "kimi_k2",
        "num_key_value_heads": config.num_heads,
        "q_lora_rank": config.hidden_size,
        "kv_lora_rank": config.hidden_size,
        "qk_nope_head_dim": 0,
        "qk_rope_head_dim": config.head_dim,
        "v_head_dim": config.head_dim,
        "n_routed_experts": _NUM_EXPERTS,
        "num_experts_per_tok": _NUM_EXPERTS,
        "n_shared_experts": _NUM_SHARED,
        "moe_intermediate_size": width,
        "first_k_dense_replace": 1,
        "moe_layer_freq": 1,
        "n_group": 1,
        "topk_group": 1,
        "topk_method": "noaux_tc",
        "scoring_func": "sigmoid",
        "norm_topk_prob": True,
        "routed_scaling_factor": float(_NUM_EXPERTS),
        "num_nextn_predict_layers": 0,
    }


def _shared_config(source: GgufFile, form: Form) -> dict[str, Any]:
    config = source.config
    extension: dict[str, Any] = {"format": EXTENSION_FORMAT, "form": form}
    if form == "kimi":
        extension["rope_groups"] = config.num_kv_heads
        extension["identity"] = ["q_a_proj", "q_a_layernorm", "kv_a_proj_latent", "kv_a_layernorm"]
    return {
        "hidden_act": "silu",
        "hidden_size": config.hidden_size,
        "intermediate_size": config.intermediate_size,
        "num_hidden_layers": config.num_layers,
        "num_attention_heads": config.num_heads,
        "vocab_size": config.vocab_size,
        "max_position_embeddings": config.max_position_embeddings,
        "rms_norm_eps": config.rms_norm_eps,
        "rope_theta": config.rope.theta,
        "attention_bias": False,
        "tie_word_embeddings": config.has_tied_head,
        "quantization_config": {"quant_method": "embergate-affine", "group_size": GROUP_SIZE, "bits": 4},
        "embergate": extension,
    }


def _generation_config(source: GgufFile) -> dict[str, Any]:
    """Ends of text: the file's own, and the token that separates documents where the vocabulary has it."""
    tokens: list[str] = source.fields["tokenizer.ggml.tokens"]
    ends = [*source.config.eos_token_ids]
    ends += [tokens.index(token) for token in ("<|endoftext|>",) if token in tokens]
    config: dict[str, Any] = {"eos_token_id": sorted(set(ends))}
    if "tokenizer.ggml.bos_token_id" in source.fields:
        config["bos_token_id"] = int(source.fields["tokenizer.ggml.bos_token_id"])
    return config
