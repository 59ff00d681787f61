"""Tokenizer and chat template of a checkpoint directory, and of a GGUF file."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from gguf import GGUFWriter

from backend.text.model_text import ModelTextError, load_model_text
from backend.text.prompt import Conversation


def write_gguf(path: Path, definition: dict[str, Any], chat_template: str | None) -> None:
    writer = GGUFWriter(path, "llama")
    tokens = sorted(definition["model"]["vocab"], key=definition["model"]["vocab"].__getitem__)
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre("gpt-2")
    writer.add_token_list(tokens)
    writer.add_token_types([3, 3, 3] + [1] * (len(tokens) - 3))
    writer.add_token_merges([" ".join(pair) for pair in definition["model"]["merges"]])
    writer.add_eos_token_id(2)
    if chat_template is not None:
        writer.add_chat_template(chat_template)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.close()


def test_a_gguf_file_gives_what_a_directory_gives(
    tmp_path: Path, definition: dict[str, Any], chatml: str
) -> None:
    write_gguf(tmp_path / "model.gguf", definition, chatml)
    (tmp_path / "tokenizer.json").write_text(json.dumps(definition))
    (tmp_path / "chat_template.jinja").write_text(chatml)
    conversation = [{"role": "user", "content": "hello 삼겹살 <|im_end|>"}]
    encoded = []
    for path in (tmp_path, tmp_path / "model.gguf"):
        text = load_model_text(path, cache_chars=0, vocab_size=267)
        encoded.append((text.encode(Conversation(conversation)).token_ids, text.token_bytes))
    assert encoded[0] == encoded[1]


def test_a_gguf_file_without_a_template_is_named(tmp_path: Path, definition: dict[str, Any]) -> None:
    write_gguf(tmp_path / "model.gguf", definition, None)
    with pytest.raises(ModelTextError, match=r"model\.gguf: the chat template is missing"):
        load_model_text(tmp_path / "model.gguf", cache_chars=0, vocab_size=267)


def test_a_file_that_is_no_gguf_is_named(tmp_path: Path) -> None:
    (tmp_path / "model.gguf").write_bytes(b"no such thing at all")
    with pytest.raises(ModelTextError, match=r"model\.gguf: not a readable GGUF file"):
        load_model_text(tmp_path / "model.gguf", cache_chars=0, vocab_size=267)


def test_an_unsupported_vocabulary_is_named(
    tmp_path: Path, definition: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(GGUFWriter, "add_tokenizer_pre", lambda self, pre: None)
    writer_pre = GGUFWriter.add_tokenizer_model
    monkeypatch.setattr(GGUFWriter, "add_tokenizer_model", lambda self, model: writer_pre(self, "llama"))
    write_gguf(tmp_path / "model.gguf", definition, "x")
    with pytest.raises(ModelTextError, match=r"model\.gguf: tokenizer\.ggml\.model: 'llama'"):
        load_model_text(tmp_path / "model.gguf", cache_chars=0, vocab_size=267)


def test_a_directory_without_a_template_is_named(tmp_path: Path, definition: dict[str, Any]) -> None:
    (tmp_path / "tokenizer.json").write_text(json.dumps(definition))
    with pytest.raises(ModelTextError, match=r"chat_template\.jinja: the chat template is missing"):
        load_model_text(tmp_path, cache_chars=0, vocab_size=267)


def test_a_directory_without_a_tokenizer_is_named(tmp_path: Path) -> None:
    with pytest.raises(ModelTextError, match=r"tokenizer\.json: missing"):
        load_model_text(tmp_path, cache_chars=0, vocab_size=267)
