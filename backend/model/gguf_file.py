"""A GGUF file of the llama architecture, seen through the official safetensors names."""

from __future__ import annotations

from collections.abc import Collection
from pathlib import Path
from typing import Any

import numpy as np
import torch
from gguf import GGMLQuantizationType, GGUFReader
from gguf.quants import dequantize
from torch import Tensor

from backend.model.config import parse_config
from backend.model.errors import ModelLoadError, UnsupportedModelError
from backend.model.quant import GROUP_SIZE, AffineBlocks, Matrix, select_rows

_OUTER = {
    "token_embd.weight": "model.embed_tokens.weight",
    "output_norm.weight": "model.norm.weight",
    "output.weight": "lm_head.weight",
}
_LAYER = {
    "attn_norm": "input_layernorm",
    "ffn_norm": "post_attention_layernorm",
    "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj",
    "attn_output": "self_attn.o_proj",
    "ffn_gate": "mlp.gate_proj",
    "ffn_up": "mlp.up_proj",
    "ffn_down": "mlp.down_proj",
}


class GgufFile:
    """The weights and the metadata of one file; matrices in Q4_0, Q4_1 and Q8_0 stay as they are.

    Raises:
        ModelLoadError: when the file cannot be read or is of another architecture.
    """

    def __init__(self, path: Path) -> None:
        self._path = path
        try:
            reader = GGUFReader(str(path))
        except (OSError, ValueError) as error:
            raise ModelLoadError(f"{path}: not a readable GGUF file: {error}") from error
        self.fields: dict[str, Any] = {name: field.contents() for name, field in reader.fields.items()}
        architecture = self.fields.get("general.architecture")
        if architecture != "llama":
            raise UnsupportedModelError(
                f"{path}: general.architecture: {architecture!r} is not supported, only 'llama'"
            )
        self._tensors = {self._official_name(tensor.name): tensor for tensor in reader.tensors}
        self.config = parse_config(self._config_fields(), str(path))
        self._split: dict[str, Matrix] = {}

    @property
    def weight_names(self) -> Collection[str]:
        """Official names of whole weights, in the file's order."""
        return self._tensors.keys()

    @property
    def names(self) -> Collection[str]:
        names: set[str] = set()
        for name, tensor in self._tensors.items():
            names.update(_parts(name) if _is_affine(tensor) else (name,))
        return names

    def place_of(self, name: str) -> str:
        return f"{self._path}: {name}"

    def read(self, name: str) -> Tensor:
        """A tensor, or one of the three parts of a matrix in affine blocks."""
        for index, suffix in enumerate(("_packed", "_scale", "_min")):
            if name.endswith(suffix):
                blocks = self.matrix(name.removesuffix(suffix))
                if not isinstance(blocks, AffineBlocks):
                    raise ModelLoadError(f"{self._path}: {name}: not a quantised matrix")
                return (blocks.packed, blocks.scale, blocks.minimum)[index]
        tensor = self.matrix(name)
        if isinstance(tensor, AffineBlocks):
            raise ModelLoadError(f"{self._path}: {name}: a quantised matrix is read part by part")
        return tensor

    def matrix(self, name: str) -> Matrix:
        """A weight with rows in the official order."""
        if name not in self._split:
            self._split = {name: self._restore_rows(name, self.stored(name))}  # the parts are read in a row
        return self._split[name]

    def stored(self, name: str) -> Matrix:
        """A weight with rows in the file's order: those of q and k have rotary pairs side by side."""
        tensor = self._tensors[name]
        kind, data = tensor.tensor_type, tensor.data
        if _is_affine(tensor):
            return affine_blocks(kind, torch.from_numpy(np.array(data)))
        if kind == GGMLQuantizationType.F32 or kind == GGMLQuantizationType.F16:
            return torch.from_numpy(np.array(data))
        try:
            return torch.from_numpy(dequantize(data, kind))
        except NotImplementedError as error:
            raise UnsupportedModelError(f"{self._path}: {name}: type {kind.name} is not supported") from error

    def _restore_rows(self, name: str, matrix: Matrix) -> Matrix:
        heads = {"q_proj": self.config.num_heads, "k_proj": self.config.num_kv_heads}
        count = heads.get(name.split(".")[-2])
        return matrix if count is None else select_rows(matrix, half_split_order(count, self.config.head_dim))

    def _official_name(self, name: str) -> str:
        if name in _OUTER:
            return _OUTER[name]
        parts = name.split(".")
        if len(parts) == 4 and parts[0] == "blk" and parts[2] in _LAYER:
            return f"model.layers.{parts[1]}.{_LAYER[parts[2]]}.{parts[3]}"
        raise UnsupportedModelError(f"{self._path}: {name}: not a tensor of a plain llama model")

    def _config_fields(self) -> dict[str, Any]:
        def take(key: str, default: Any = None) -> Any:
            value = self.fields.get(f"llama.{key}", default)
            if value is None:
                raise ModelLoadError(f"{self._path}: llama.{key}: missing")
            return value

        scaling = self.fields.get("llama.rope.scaling.type", "none")
        if scaling != "none" or "llama.expert_count" in self.fields:
            field = "llama.rope.scaling.type" if scaling != "none" else "llama.expert_count"
            raise UnsupportedModelError(f"{self._path}: {field}: {self.fields[field]!r} is not supported")
        heads, hidden = take("attention.head_count"), take("embedding_length")
        eos = self.fields.get("tokenizer.ggml.eos_token_id")
        return {
            "model_type": "llama",
            "vocab_size": int(self._tensors["model.embed_tokens.weight"].shape[1]),
            "hidden_size": hidden,
            "intermediate_size": take("feed_forward_length"),
            "num_hidden_layers": take("block_count"),
            "num_attention_heads": heads,
            "num_key_value_heads": take("attention.head_count_kv", heads),
            "head_dim": take("rope.dimension_count", hidden // heads),
            "max_position_embeddings": take("context_length"),
            "rms_norm_eps": take("attention.layer_norm_rms_epsilon"),
            "rope_theta": take("rope.freq_base", 10000.0),
            "tie_word_embeddings": "lm_head.weight" not in self._tensors,
            "eos_token_id": [] if eos is None else [int(eos)],
        }


def half_split_order(num_heads: int, head_dim: int) -> Tensor:
    """Row indices that turn rotary pairs side by side into pairs half a head apart, ``[heads * dim]``."""
    rows = torch.arange(num_heads * head_dim).view(num_heads, head_dim // 2, 2)
    return rows.transpose(1, 2).reshape(-1)


def _parts(name: str) -> tuple[str, str, str]:
    return f"{name}_packed", f"{name}_scale", f"{name}_min"


def _is_affine(tensor: Any) -> bool:
    kinds = (GGMLQuantizationType.Q4_0, GGMLQuantizationType.Q4_1, GGMLQuantizationType.Q8_0)
    return tensor.tensor_type in kinds


def affine_blocks(kind: GGMLQuantizationType, data: Tensor) -> AffineBlocks:
    """Take blocks apart: ``[scale f16][min f16, Q4_1 only][the integers]``."""
    num_halves = 2 if kind == GGMLQuantizationType.Q4_1 else 1
    width = 2 * num_halves + (GROUP_SIZE if kind == GGMLQuantizationType.Q8_0 else GROUP_SIZE // 2)
    blocks = data.view(data.shape[0], -1, width)
    halves = blocks[:, :, : 2 * num_halves].contiguous().view(torch.float16)
    integers = blocks[:, :, 2 * num_halves :]
    scale = halves[:, :, 0].contiguous()
    if kind == GGMLQuantizationType.Q8_0:
        integers = integers ^ 0x80  # two's complement to offset binary
        minimum = scale * -128.0
    elif kind == GGMLQuantizationType.Q4_0:
        minimum = scale * -8.0
    else:
        minimum = halves[:, :, 1].contiguous()
    return AffineBlocks(integers.reshape(data.shape[0], -1).contiguous(), scale, minimum)
