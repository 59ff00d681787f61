"""Writes a vocabulary in the form of Kimi's: a tiktoken file, and the special tokens in their slots."""

from __future__ import annotations

import base64
from collections.abc import Iterable, Mapping
from pathlib import Path
from types import MappingProxyType
from typing import Any, Final

NUM_SLOTS: Final = 256
"""Special slots behind the ordinary tokens; those without a name are kept all the same."""

BEGIN_SLOT: Final = 0
END_OF_TURN_SLOT: Final = 2
MEDIA_SLOT: Final = 21
PAD_SLOT: Final = 255

_SPECIAL: Final[Mapping[int, str]] = MappingProxyType(
    {
        BEGIN_SLOT: "[BOS]",
        1: "[EOS]",
        END_OF_TURN_SLOT: "<|im_end|>",
        3: "<|im_user|>",
        4: "<|im_assistant|>",
        6: "<|start_header_id|>",
        7: "<|end_header_id|>",
        9: "[EOT]",
        10: "<|im_system|>",
        17: "<|im_middle|>",
        18: "<|media_begin|>",
        19: "<|media_content|>",
        20: "<|media_end|>",
        MEDIA_SLOT: "<|media_pad|>",
        254: "[UNK]",
        PAD_SLOT: "[PAD]",
    }
)

# Marks that an answer shows and a parser reads.
_SHOWN: Final[Mapping[int, str]] = MappingProxyType(
    {
        11: "<|tool_calls_section_begin|>",
        12: "<|tool_calls_section_end|>",
        13: "<|tool_call_begin|>",
        14: "<|tool_call_argument_begin|>",
        15: "<|tool_call_end|>",
        22: "<think>",
        23: "</think>",
    }
)


def rank_tokens(tokens: Iterable[bytes], limit: int | None = None) -> dict[bytes, int]:
    """Ranks of ordinary tokens in their order: all single bytes first, duplicates and empty ones left out.

    Args:
        tokens: in the order in which a byte-pair encoder learned them.
        limit: how many to keep; the last learned ones go.
    """
    single = [bytes([byte]) for byte in range(256)]
    longer = dict.fromkeys(token for token in tokens if len(token) > 1)
    return {token: rank for rank, token in enumerate([*single, *longer][:limit])}


def write_ranks(path: Path, ranks: Mapping[bytes, int]) -> None:
    """Write a tiktoken file."""
    lines = [b"%b %d\n" % (base64.b64encode(token), rank) for token, rank in ranks.items()]
    path.write_bytes(b"".join(lines))


def tokenizer_config(num_ordinary: int) -> dict[str, Any]:
    """``tokenizer_config.json`` for a vocabulary of ``num_ordinary`` ordinary tokens."""
    entries = {slot: (content, True) for slot, content in _SPECIAL.items()}
    entries |= {slot: (content, False) for slot, content in _SHOWN.items()}
    added = {
        str(num_ordinary + slot): {
            "content": content,
            "lstrip": False,
            "normalized": False,
            "rstrip": False,
            "single_word": False,
            "special": is_special,
        }
        for slot, (content, is_special) in sorted(entries.items())
    }
    return {
        "added_tokens_decoder": added,
        "bos_token": "[BOS]",
        "eos_token": "[EOS]",
        "unk_token": "[UNK]",
        "pad_token": "[PAD]",
        "clean_up_tokenization_spaces": False,
        "model_max_length": 10**30,
        "tokenizer_class": "TikTokenTokenizer",
    }
