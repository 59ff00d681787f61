"""A tiny random llama GGUF in the types of the embedded model, and what it says of itself."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
from gguf import GGMLQuantizationType, GGUFWriter
from gguf.quants import quantize
from tokenizers import pre_tokenizers

HIDDEN, HEADS, KV_HEADS, HEAD_DIM, FFN, LAYERS, VOCAB = 96, 6, 2, 32, 512, 2, 261


def write_tiny_gguf(path: Path, *, seed: int = 0, **metadata: Any) -> None:
    """Write a 2-layer llama (Q4_1 matrices, Q8_0 embedding, tied head); ``metadata`` are integer keys."""
    rng = np.random.default_rng(seed)
    writer = GGUFWriter(str(path), "llama")
    writer.add_block_count(LAYERS)
    writer.add_context_length(512)
    writer.add_embedding_length(HIDDEN)
    writer.add_feed_forward_length(FFN)
    writer.add_head_count(HEADS)
    writer.add_head_count_kv(KV_HEADS)
    writer.add_rope_dimension_count(HEAD_DIM)
    writer.add_rope_freq_base(10000.0)
    writer.add_layer_norm_rms_eps(1e-5)
    for key, value in metadata.items():
        writer.add_uint32(key, value)
    _add_vocabulary(writer)
    for name, rows, columns in _shapes():
        kind = GGMLQuantizationType.Q8_0 if name == "token_embd" else GGMLQuantizationType.Q4_1
        matrix = rng.normal(scale=0.15, size=(rows, columns)).astype(np.float32)
        writer.add_tensor(f"{name}.weight", quantize(matrix, kind), raw_dtype=kind)
    norms = ["output_norm", *(f"blk.{n}.{name}" for n in range(LAYERS) for name in ("attn_norm", "ffn_norm"))]
    for name in norms:
        writer.add_tensor(f"{name}.weight", rng.uniform(0.5, 1.5, HIDDEN).astype(np.float32))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


def _shapes() -> list[tuple[str, int, int]]:
    shapes = [("token_embd", VOCAB, HIDDEN)]
    for layer in range(LAYERS):
        prefix = f"blk.{layer}."
        shapes += [
            (prefix + "attn_q", HEADS * HEAD_DIM, HIDDEN),
            (prefix + "attn_k", KV_HEADS * HEAD_DIM, HIDDEN),
            (prefix + "attn_v", KV_HEADS * HEAD_DIM, HIDDEN),
            (prefix + "attn_output", HIDDEN, HEADS * HEAD_DIM),
            (prefix + "ffn_gate", FFN, HIDDEN),
            (prefix + "ffn_up", FFN, HIDDEN),
            (prefix + "ffn_down", HIDDEN, FFN),
        ]
    return shapes


def _add_vocabulary(writer: GGUFWriter) -> None:
    specials = ["<|endoftext|>", "<|im_start|>", "<|im_end|>", "<|pad|>"]
    tokens = [*specials, *sorted(pre_tokenizers.ByteLevel.alphabet()), "he"]
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre("smollm")
    writer.add_token_list(tokens)
    writer.add_token_types([3] * len(specials) + [1] * (len(tokens) - len(specials)))
    writer.add_token_merges(["h e"])
    writer.add_bos_token_id(1)
    writer.add_eos_token_id(2)
    writer.add_chat_template("{% for message in messages %}{{ message['content'] }}{% endfor %}")
