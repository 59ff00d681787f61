"""A GGUF file's tokenizer metadata becomes an ordinary tokenizer, or an error that names the key."""

from __future__ import annotations

from typing import Any

import pytest
from tokenizers import Tokenizer, pre_tokenizers

from backend.text.gguf_tokenizer import BadVocabularyError, build_tokenizer, build_tokenizer_config


@pytest.fixture
def fields() -> dict[str, Any]:
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    tokens = ["<|end|>", "<tool>", *alphabet, "Ġa", "12"]
    return {
        "tokenizer.ggml.model": "gpt2",
        "tokenizer.ggml.pre": "smollm",
        "tokenizer.ggml.tokens": tokens,
        "tokenizer.ggml.token_type": [3, 4] + [1] * (len(tokens) - 2),
        "tokenizer.ggml.merges": ["Ġ a", "1 2"],
        "tokenizer.ggml.eos_token_id": 0,
        "tokenizer.chat_template": "{{ messages }}",
    }


def test_text_survives_a_round_trip(fields: dict[str, Any]) -> None:
    tokenizer = build_tokenizer(fields)
    text = " a 12 삼겹살 👋🏽\n\n\tď"
    assert tokenizer.decode(tokenizer.encode(text).ids) == text


def test_digits_are_split_singly_for_smollm_and_not_for_gpt2(fields: dict[str, Any]) -> None:
    assert build_tokenizer(fields).encode("12").tokens == ["1", "2"]
    fields["tokenizer.ggml.pre"] = "gpt-2"
    assert build_tokenizer(fields).encode("12").tokens == ["12"]


def test_no_space_is_put_before_the_text(fields: dict[str, Any]) -> None:
    assert build_tokenizer(fields).encode("a").tokens == ["a"]


def test_control_tokens_are_special_and_user_defined_ones_are_not(fields: dict[str, Any]) -> None:
    tokenizer = build_tokenizer(fields)
    ids = tokenizer.encode("<tool>a<|end|>").ids
    assert ids[0] == 1
    assert ids[-1] == 0
    assert tokenizer.decode(ids) == "<tool>a"


def test_ids_are_kept_when_saved_and_read_again(fields: dict[str, Any], tmp_path: Any) -> None:
    tokenizer = build_tokenizer(fields)
    tokenizer.save(str(tmp_path / "tokenizer.json"))
    read = Tokenizer.from_file(str(tmp_path / "tokenizer.json"))
    assert read.get_vocab_size() == len(fields["tokenizer.ggml.tokens"])
    assert read.encode("x<|end|>a").ids == tokenizer.encode("x<|end|>a").ids


@pytest.mark.parametrize("key", ["tokenizer.ggml.model", "tokenizer.ggml.tokens", "tokenizer.ggml.merges"])
def test_a_missing_key_is_named(fields: dict[str, Any], key: str) -> None:
    del fields[key]
    with pytest.raises(BadVocabularyError, match=key):
        build_tokenizer(fields)


@pytest.mark.parametrize(
    ("key", "value"),
    [
        ("tokenizer.ggml.model", "llama"),
        ("tokenizer.ggml.pre", "never-heard-of"),
        ("tokenizer.ggml.token_type", [1]),
        ("tokenizer.ggml.merges", ["ab"]),
    ],
)
def test_an_unusable_value_is_named(fields: dict[str, Any], key: str, value: Any) -> None:
    fields[key] = value
    with pytest.raises(BadVocabularyError, match=key):
        build_tokenizer(fields)


@pytest.mark.parametrize("pre", ["gpt-2", "default", "smollm", "llama-bpe", "qwen2"])
def test_every_known_pre_tokenizer_builds(fields: dict[str, Any], pre: str) -> None:
    fields["tokenizer.ggml.pre"] = pre
    text = "It's 2024,  ok?\n\n x"
    tokenizer = build_tokenizer(fields)
    assert tokenizer.decode(tokenizer.encode(text).ids) == text


def test_the_configuration_names_special_spellings_and_the_template(fields: dict[str, Any]) -> None:
    config = build_tokenizer_config(fields)
    assert config["eos_token"] == "<|end|>"
    assert config["chat_template"] == "{{ messages }}"
    assert "bos_token" not in config


def test_a_special_id_outside_the_vocabulary_is_named(fields: dict[str, Any]) -> None:
    fields["tokenizer.ggml.eos_token_id"] = 10**6
    with pytest.raises(BadVocabularyError, match=r"tokenizer\.ggml\.eos_token_id"):
        build_tokenizer_config(fields)
