"""A small vocabulary in the form of Kimi's: a tiktoken file and the special tokens in their slots."""

from __future__ import annotations

import base64
import json
from functools import cache
from pathlib import Path
from typing import Any

from backend.text.kimi.tokenizer import TiktokenTokenizer

# Slot behind the ordinary tokens -> spelling, and whether it is left out of texts. The gaps matter.
SLOTS = {
    0: ("[BOS]", True),
    1: ("[EOS]", True),
    2: ("<|im_end|>", True),
    3: ("<|im_user|>", True),
    4: ("<|im_assistant|>", True),
    6: ("<|start_header_id|>", True),
    7: ("<|end_header_id|>", True),
    9: ("[EOT]", True),
    10: ("<|im_system|>", True),
    11: ("<|tool_calls_section_begin|>", False),
    12: ("<|tool_calls_section_end|>", False),
    13: ("<|tool_call_begin|>", False),
    14: ("<|tool_call_argument_begin|>", False),
    15: ("<|tool_call_end|>", False),
    17: ("<|im_middle|>", True),
    18: ("<|media_begin|>", True),
    19: ("<|media_content|>", True),
    20: ("<|media_end|>", True),
    21: ("<|media_pad|>", True),
    22: ("<think>", False),
    23: ("</think>", False),
    254: ("[UNK]", True),
    255: ("[PAD]", True),
}
_MERGES = ("he", "ll", "hell", "hello", " w", "or", "ld", "<|", "|>", "im", '{"', '":', "삼".encode()[:2])


def tiny_ranks() -> dict[bytes, int]:
    """256 bytes, in an order of their own, and a few merges."""
    tokens = [bytes([byte]) for byte in (*range(32, 256), *range(32))]
    tokens += [token if isinstance(token, bytes) else token.encode() for token in _MERGES]
    return {token: rank for rank, token in enumerate(tokens)}


def tiny_added() -> dict[int, dict[str, Any]]:
    """``added_tokens_decoder`` of the small vocabulary."""
    base = len(tiny_ranks())
    return {base + slot: {"content": text, "special": hides} for slot, (text, hides) in SLOTS.items()}


def write_kimi_text(directory: Path) -> None:
    """Write the files of a checkpoint's text side."""
    lines = [b"%b %d" % (base64.b64encode(token), rank) for token, rank in tiny_ranks().items()]
    (directory / "tiktoken.model").write_bytes(b"\n".join(lines) + b"\n")
    config = {"added_tokens_decoder": {str(slot): entry for slot, entry in tiny_added().items()}}
    (directory / "tokenizer_config.json").write_text(json.dumps(config))


@cache
def tiny_tokenizer() -> TiktokenTokenizer:
    return TiktokenTokenizer(tiny_ranks(), tiny_added(), cache_chars=100_000)


def spoken(text: str, tokenizer: TiktokenTokenizer | None = None) -> list[int]:
    """The tokens of an answer, in which the model's special tokens are spelled out."""
    tokenizer = tokenizer or tiny_tokenizer()
    texts, specials = [""], []
    while text:
        begins = [spelling for spelling in tokenizer.special_tokens if text.startswith(spelling)]
        if begins:
            specials.append(begins[0])
            texts.append("")
            text = text[len(begins[0]) :]
        else:
            texts[-1] += text[0]
            text = text[1:]
    return tokenizer.encode_pieces(texts, specials)
