"""BERT as an encoder: the architecture of MiniLM, BGE and most small embedding models.

Post-norm transformer layers with exact GELU over word, position and token-type embeddings; every token sees
every other of its own text.
"""

from __future__ import annotations

from pathlib import Path

import msgspec
import torch
from safetensors import SafetensorError
from safetensors.torch import load_file
from torch import Tensor
from torch.nn import functional


class BertError(ValueError):
    """The checkpoint cannot be served; the message says what is wrong with it."""


class BertConfig(msgspec.Struct, frozen=True):
    """``config.json``, as far as it matters."""

    hidden_size: int
    num_hidden_layers: int
    num_attention_heads: int
    intermediate_size: int
    max_position_embeddings: int
    vocab_size: int
    model_type: str = "bert"
    hidden_act: str = "gelu"
    position_embedding_type: str = "absolute"
    layer_norm_eps: float = 1e-12


class Bert:
    """Weights and the forward pass, float32 on the CPU. Thread-safe: nothing is kept between calls."""

    def __init__(self, config: BertConfig, weights: dict[str, Tensor]) -> None:
        self.config = config
        self._weights = weights
        self._embeddings = _Linear(weights, "embeddings.LayerNorm")
        self._layers = [
            _Layer(weights, f"encoder.layer.{index}") for index in range(config.num_hidden_layers)
        ]

    @classmethod
    def from_directory(cls, path: Path) -> Bert:
        """Load a checkpoint. Raises BertError."""
        try:
            config = msgspec.json.decode((path / "config.json").read_bytes(), type=BertConfig)
            weights = load_file(path / "model.safetensors")
        except (OSError, msgspec.DecodeError, SafetensorError) as error:
            raise BertError(f"the embedding model in {path} cannot be read: {error}") from error
        _check(config, weights)
        try:
            return cls(config, {name: tensor.float() for name, tensor in weights.items()})
        except KeyError as error:
            raise BertError(f"the embedding model in {path} lacks the tensor {error}") from error

    @torch.inference_mode()
    def hidden_states(self, token_ids: Tensor, mask: Tensor) -> Tensor:
        """Last hidden states ``[texts, tokens, hidden]`` of ``token_ids`` ``[texts, tokens]``.

        ``mask`` is True where a token is one, False where it only fills up.
        """
        weights, eps = self._weights, self.config.layer_norm_eps
        num_texts, num_tokens = token_ids.shape
        hidden = functional.embedding(token_ids, weights["embeddings.word_embeddings.weight"])
        hidden = hidden + weights["embeddings.position_embeddings.weight"][:num_tokens]
        hidden = hidden + weights["embeddings.token_type_embeddings.weight"][0]
        hidden = self._embeddings.normalise(hidden, eps)
        attended = mask[:, None, None, :].expand(num_texts, 1, num_tokens, num_tokens)
        for layer in self._layers:
            hidden = layer.forward(hidden, attended, self.config.num_attention_heads, eps)
        return hidden


class _Linear:
    """A weight and a bias: of a projection, or of a layer norm."""

    def __init__(self, weights: dict[str, Tensor], name: str) -> None:
        self.weight = weights[f"{name}.weight"]
        self.bias = weights[f"{name}.bias"]

    def project(self, hidden: Tensor) -> Tensor:
        return functional.linear(hidden, self.weight, self.bias)

    def normalise(self, hidden: Tensor, eps: float) -> Tensor:
        return functional.layer_norm(hidden, self.weight.shape, self.weight, self.bias, eps)


class _Layer:
    def __init__(self, weights: dict[str, Tensor], name: str) -> None:
        self._query = _Linear(weights, f"{name}.attention.self.query")
        self._key = _Linear(weights, f"{name}.attention.self.key")
        self._value = _Linear(weights, f"{name}.attention.self.value")
        self._output = _Linear(weights, f"{name}.attention.output.dense")
        self._attention_norm = _Linear(weights, f"{name}.attention.output.LayerNorm")
        self._up = _Linear(weights, f"{name}.intermediate.dense")
        self._down = _Linear(weights, f"{name}.output.dense")
        self._norm = _Linear(weights, f"{name}.output.LayerNorm")

    def forward(self, hidden: Tensor, attended: Tensor, num_heads: int, eps: float) -> Tensor:
        shape = (*hidden.shape[:2], num_heads, -1)
        query, key, value = (
            part.project(hidden).view(shape).transpose(1, 2) for part in (self._query, self._key, self._value)
        )
        context = functional.scaled_dot_product_attention(query, key, value, attn_mask=attended)
        context = context.transpose(1, 2).reshape(hidden.shape)
        hidden = self._attention_norm.normalise(hidden + self._output.project(context), eps)
        inner = functional.gelu(self._up.project(hidden))
        return self._norm.normalise(hidden + self._down.project(inner), eps)


def _check(config: BertConfig, weights: dict[str, Tensor]) -> None:
    known = {"model_type": "bert", "hidden_act": "gelu", "position_embedding_type": "absolute"}
    for name, value in known.items():
        if getattr(config, name) != value:
            raise BertError(f"embedding models with {name} {getattr(config, name)!r} are not supported")
    words = weights.get("embeddings.word_embeddings.weight")
    if words is None or tuple(words.shape) != (config.vocab_size, config.hidden_size):
        raise BertError("the word embeddings do not have the shape that config.json says")
