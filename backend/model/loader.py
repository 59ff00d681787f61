"""From a path to a loaded model."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

from backend.model.attention import GroupedQueryAttention
from backend.model.checkpoint import CONFIG, SafetensorsCheckpoint, read_json
from backend.model.config import ModelConfig, parse_config
from backend.model.errors import ModelLoadError
from backend.model.gguf_file import GgufFile
from backend.model.linear import build_embedding_and_head
from backend.model.mla import LatentAttention
from backend.model.mlp import DenseMlp
from backend.model.moe import FullMoeMlp, SparseMoeMlp
from backend.model.placement import Placement
from backend.model.rope import build_rope_table
from backend.model.transformer import Attention, DecoderLayer, Mlp, Transformer
from backend.model.weights import TensorSource, WeightReader

ChoosePlacement = Callable[[ModelConfig], Placement]


def open_model(path: Path) -> tuple[ModelConfig, TensorSource]:
    """Read what a model is, without its weights.

    Args:
        path: a directory with ``config.json`` and safetensors files, or a GGUF file.

    Raises:
        ModelLoadError: naming the file and the field that is wrong.
    """
    if path.is_dir():
        config = parse_config(_with_generation_config(path), str(path / CONFIG))
        return config, SafetensorsCheckpoint(path)
    if not path.exists():
        raise ModelLoadError(f"{path}: there is no model there")
    if path.suffix != ".gguf":
        raise ModelLoadError(f"{path}: neither a model directory nor a .gguf file")
    gguf = GgufFile(path)
    return gguf.config, gguf


def load_model(path: Path, max_model_len: int, choose_placement: ChoosePlacement) -> Transformer:
    """Load a model layer by layer.

    Args:
        path: see :func:`open_model`.
        max_model_len: positions to prepare for; the model's own limit when that is smaller.
        choose_placement: decides device, type and kernels once the shape is known.

    Raises:
        ModelLoadError: naming the file and the tensor or field that is wrong.
    """
    config, source = open_model(path)
    placement = choose_placement(config)
    reader = WeightReader(source)
    embedding_matrix = reader.matrix("model.embed_tokens.weight", config.vocab_size, config.hidden_size)
    layers = tuple(_read_layer(config, reader, layer, placement) for layer in range(config.num_layers))
    norm = reader.vector("model.norm.weight", config.hidden_size)
    head_matrix = None
    if config.has_tied_head:
        reader.ignore("lm_head.")
    else:
        head_matrix = reader.matrix("lm_head.weight", config.vocab_size, config.hidden_size)
    embedding, head = build_embedding_and_head(embedding_matrix, head_matrix, placement)
    for extra in range(config.num_next_token_layers):
        reader.ignore(f"model.layers.{config.num_layers + extra}.")
    reader.finish()
    positions = min(max_model_len, config.max_position_embeddings)
    return Transformer(
        config=config,
        placement=placement,
        embedding=embedding,
        layers=layers,
        norm=placement.put(norm),
        head=head,
        rope_table=build_rope_table(config.rope, positions, placement.device),
    )


def _read_layer(config: ModelConfig, reader: WeightReader, layer: int, placement: Placement) -> DecoderLayer:
    prefix, hidden = f"model.layers.{layer}", config.hidden_size

    attention: Attention
    if config.mla is not None:
        attention = LatentAttention(config, config.mla, reader, f"{prefix}.self_attn", placement)
    else:
        attention = GroupedQueryAttention(config, reader, f"{prefix}.self_attn", placement)
    mlp: Mlp
    if config.moe is not None and config.is_moe_layer(layer):
        kind = FullMoeMlp if config.moe.chooses_all else SparseMoeMlp
        mlp = kind(config, config.moe, reader, f"{prefix}.mlp", placement)
    else:
        mlp = DenseMlp(hidden, config.intermediate_size, reader, f"{prefix}.mlp", placement)
    norms = [
        placement.put(reader.vector(f"{prefix}.{name}.weight", hidden))
        for name in ("input_layernorm", "post_attention_layernorm")
    ]
    return DecoderLayer(norms[0], attention, norms[1], mlp)


def _with_generation_config(directory: Path) -> dict[str, object]:
    """``config.json`` with the end-of-sequence ids of ``generation_config.json``, which is the later word."""
    fields = dict(read_json(directory / CONFIG))
    generation = directory / "generation_config.json"
    if generation.is_file():
        eos = read_json(generation).get("eos_token_id")
        if eos is not None:
            fields["eos_token_id"] = eos
    return fields
