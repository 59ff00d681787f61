"""A tiny random BERT with a tokenizer of whole words, and the same model in transformers for comparison."""

from __future__ import annotations

import json
from pathlib import Path

import torch
from safetensors.torch import save_file
from tokenizers import Tokenizer, models, pre_tokenizers, processors
from transformers import BertConfig, BertModel

WORDS = ("[PAD]", "[UNK]", "[CLS]", "[SEP]", "a", "red", "green", "blue", "fox", "sees", "the", "moon")
BEGIN, END = 2, 3
MAX_LEN = 16


def write_tiny_bert(directory: Path) -> BertModel:
    """Write a checkpoint as published ones look; returns the model that it was made from."""
    config = BertConfig(
        vocab_size=len(WORDS),
        hidden_size=24,
        num_hidden_layers=2,
        num_attention_heads=3,
        intermediate_size=40,
        max_position_embeddings=MAX_LEN,
    )
    torch.manual_seed(7)
    model = BertModel(config).eval()
    directory.mkdir(parents=True)
    save_file(
        {name: tensor.clone() for name, tensor in model.state_dict().items()}, directory / "model.safetensors"
    )
    fields = {name: getattr(config, name) for name in (
        "hidden_size", "num_hidden_layers", "num_attention_heads", "intermediate_size",
        "max_position_embeddings", "vocab_size", "layer_norm_eps",
    )}  # fmt: skip
    (directory / "config.json").write_text(json.dumps({"model_type": "bert", "hidden_act": "gelu", **fields}))
    tokenizer = Tokenizer(
        models.WordLevel({word: index for index, word in enumerate(WORDS)}, unk_token="[UNK]")
    )
    tokenizer.pre_tokenizer = pre_tokenizers.Whitespace()
    tokenizer.post_processor = processors.TemplateProcessing(
        single="[CLS] $A [SEP]", special_tokens=[("[CLS]", BEGIN), ("[SEP]", END)]
    )
    tokenizer.enable_truncation(4)  # published tokenizers come with such settings, which must not hold here
    tokenizer.enable_padding(length=9)
    tokenizer.save(str(directory / "tokenizer.json"))
    return model
