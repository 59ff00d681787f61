"""From a path to a loaded model."""

from __future__ import annotations

import logging
from collections.abc import Callable
from pathlib import Path

from backend.model.attention import GroupedQueryAttention
from backend.model.checkpoint import SafetensorsCheckpoint
from backend.model.config import ModelConfig, parse_config
from backend.model.errors import ModelLoadError
from backend.model.gguf_file import GgufFile
from backend.model.headers import CONFIG, read_object
from backend.model.linear import build_embedding_and_head
from backend.model.mla import LatentAttention
from backend.model.mlp import DenseMlp
from backend.model.moe import FullMoeMlp, SparseMoeMlp
from backend.model.placement import Placement
from backend.model.rope import build_rope_table
from backend.model.sharding import Sharding
from backend.model.text_tensors import TextTensors
from backend.model.transformer import Attention, DecoderLayer, Mlp, Transformer
from backend.model.vision import VisionTower
from backend.model.weights import TensorSource, WeightReader

ChoosePlacement = Callable[[ModelConfig], Placement]
Progress = Callable[[float, str], None]

_VISION_PREFIXES = ("vision_tower.", "mm_projector.")
_logger = logging.getLogger("backend.model")


def open_model(path: Path) -> tuple[ModelConfig, TensorSource]:
    """Read what a model is, without its weights.

    Args:
        path: a directory with ``config.json`` and safetensors files, or a GGUF file.

    Raises:
        ModelLoadError: naming the file and the field that is wrong.
    """
    if path.is_dir():
        config = parse_config(_with_generation_config(path), str(path / CONFIG))
        return config, TextTensors(SafetensorsCheckpoint(path))
    if not path.exists():
        raise ModelLoadError(f"{path}: there is no model there")
    if path.suffix != ".gguf":
        raise ModelLoadError(f"{path}: neither a model directory nor a .gguf file")
    gguf = GgufFile(path)
    return gguf.config, gguf


def load_model(
    path: Path,
    max_model_len: int,
    choose_placement: ChoosePlacement,
    *,
    text_only: bool = False,
    progress: Progress = lambda share, doing: None,
    sharding: Sharding | None = None,
) -> Transformer:
    """Load a model layer by layer, which is shard by shard in a checkpoint that keeps each layer in one.

    Args:
        path: see :func:`open_model`.
        max_model_len: positions to prepare for; the model's own limit when that is smaller.
        choose_placement: decides device, type and kernels once the shape is known.
        text_only: leave out a vision tower that the checkpoint has.
        progress: called with the share done (0 to 1) and what is being done.
        sharding: makes it one rank's part of the model.

    Raises:
        ModelLoadError: naming the file and the tensor or field that is wrong.
    """
    config, source = open_model(path)
    placement = choose_placement(config)
    vocab_size = config.vocab_size
    if sharding is not None:
        config, source, vocab_size = sharding.localise(config, source)
    reader = WeightReader(source, placement.dtype)
    if config.vision is not None and text_only:
        _leave_out_vision(reader, path)
    num_stages = config.num_layers + 2
    progress(0.0, "loading the embedding")
    embedding_matrix = reader.matrix("model.embed_tokens.weight", vocab_size, config.hidden_size)
    layers = []
    for layer in range(config.num_layers):
        progress((layer + 1) / num_stages, f"loading layer {layer + 1} of {config.num_layers}")
        layers.append(_read_layer(config, reader, layer, placement, sharding))
    progress(1 - 1 / num_stages, "loading the head")
    norm = reader.vector("model.norm.weight", config.hidden_size)
    head_matrix = None
    if config.has_tied_head:
        reader.ignore("lm_head.")
    else:
        head_matrix = reader.matrix("lm_head.weight", vocab_size, config.hidden_size)
    ends = build_embedding_and_head(embedding_matrix, head_matrix, placement)
    embedding, head = ends if sharding is None else sharding.join_ends(*ends)
    for extra in range(config.num_next_token_layers):
        reader.ignore(f"model.layers.{config.num_layers + extra}.")
    vision = None
    if config.vision is not None and not text_only:
        progress(1 - 1 / num_stages, "loading the vision tower")
        vision = VisionTower(config.vision, reader, placement)
    reader.finish()
    positions = min(max_model_len, config.max_position_embeddings)
    return Transformer(
        config=config,
        placement=placement,
        embedding=embedding,
        layers=tuple(layers),
        norm=placement.put(norm),
        head=head,
        rope_table=build_rope_table(config.rope, positions, placement.device),
        vision=vision,
        takes_turns=sharding is not None and sharding.takes_turns,
    )


def _read_layer(
    config: ModelConfig,
    reader: WeightReader,
    layer: int,
    placement: Placement,
    sharding: Sharding | None,
) -> DecoderLayer:
    prefix, hidden = f"model.layers.{layer}", config.hidden_size

    attention: Attention
    if config.mla is not None:
        attention = LatentAttention(config, config.mla, reader, f"{prefix}.self_attn", placement)
    else:
        attention = GroupedQueryAttention(config, reader, f"{prefix}.self_attn", placement)
    mlp: Mlp
    if config.moe is not None and config.is_moe_layer(layer) and sharding is not None:
        mlp = sharding.read_experts(config, config.moe, reader, f"{prefix}.mlp", placement)
    elif config.moe is not None and config.is_moe_layer(layer):
        kind = FullMoeMlp if config.moe.chooses_all else SparseMoeMlp
        mlp = kind(config, config.moe, reader, f"{prefix}.mlp", placement)
    else:
        mlp = DenseMlp(hidden, config.intermediate_size, reader, f"{prefix}.mlp", placement)
        if sharding is not None:
            mlp = sharding.join_mlp(mlp)
    if sharding is not None:
        attention = sharding.join_attention(attention)
    norms = [
        placement.put(reader.vector(f"{prefix}.{name}.weight", hidden))
        for name in ("input_layernorm", "post_attention_layernorm")
    ]
    return DecoderLayer(norms[0], attention, norms[1], mlp)


def _leave_out_vision(reader: WeightReader, path: Path) -> None:
    num_tensors = sum(reader.ignore(prefix) for prefix in _VISION_PREFIXES)
    if num_tensors:
        fields = {"path": str(path), "num_tensors": num_tensors}
        _logger.info("text only: vision tensors left out", extra={"fields": fields})


def _with_generation_config(directory: Path) -> dict[str, object]:
    """``config.json`` with the end-of-sequence ids of ``generation_config.json``, which is the later word."""
    fields = dict(read_object(directory / CONFIG))
    generation = directory / "generation_config.json"
    if generation.is_file():
        eos = read_object(generation).get("eos_token_id")
        if eos is not None:
            fields["eos_token_id"] = eos
    return fields
