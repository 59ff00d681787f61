"""A small vocabulary with everything that can go wrong: split characters, merges, special spellings."""

from __future__ import annotations

import json
from typing import Any

import pytest
import tokenizers
from tokenizers import pre_tokenizers

from backend.text.tokenizer import Tokenizer

SPECIALS = ("<|endoftext|>", "<|im_start|>", "<|im_end|>")
CHATML = (
    "{% for message in messages %}"
    "{{'<|im_start|>' + message['role'] + '\n' + message['content'] + '<|im_end|>' + '\n'}}"
    "{% endfor %}{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)


def make_definition() -> dict[str, Any]:
    """A ``tokenizer.json`` of 256 bytes, a few merges and the ChatML specials."""
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    merges = [
        ("h", "e"),
        ("l", "l"),
        ("he", "ll"),
        ("hell", "o"),
        ("Ġ", "w"),
        ("i", "m"),
        ("<", "|"),
        ("|", ">"),
    ]
    tokens = [*SPECIALS, *alphabet, *("".join(pair) for pair in merges)]
    return {
        "version": "1.0",
        "added_tokens": [
            {"id": index, "content": spelling, "special": True, "single_word": False, "lstrip": False,
             "rstrip": False, "normalized": False}
            for index, spelling in enumerate(SPECIALS)
        ],
        "normalizer": None,
        "pre_tokenizer": {
            "type": "ByteLevel", "add_prefix_space": False, "trim_offsets": True, "use_regex": True,
        },
        "post_processor": None,
        "decoder": {"type": "ByteLevel", "add_prefix_space": True, "trim_offsets": True, "use_regex": True},
        "model": {
            "type": "BPE", "dropout": None, "unk_token": None, "continuing_subword_prefix": None,
            "end_of_word_suffix": None, "fuse_unk": False, "byte_fallback": False, "ignore_merges": False,
            "vocab": {token: index for index, token in enumerate(tokens)},
            "merges": [list(pair) for pair in merges],
        },
    }  # fmt: skip


@pytest.fixture
def definition() -> dict[str, Any]:
    return make_definition()


@pytest.fixture(scope="session")
def tokenizer() -> Tokenizer:
    return Tokenizer(make_definition(), cache_chars=100_000)


@pytest.fixture(scope="session")
def whole_tokenizer() -> tokenizers.Tokenizer:
    """The same vocabulary as the library itself reads it, special tokens included."""
    return tokenizers.Tokenizer.from_str(json.dumps(make_definition()))


@pytest.fixture(scope="session")
def chatml() -> str:
    return CHATML
