"""A checkpoint directory with a tiktoken file is read as Kimi's."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from backend.text.kimi.parser import KimiOutputForm
from backend.text.kimi.template import DEFAULT_SYSTEM
from backend.text.messages import BadMessageError
from backend.text.model_text import ModelTextError, load_model_text
from backend.text.prompt import Conversation, ModelText
from tests.support.kimi_answers import TOOLS
from tests.support.kimi_text import tiny_tokenizer, write_kimi_text

SPECIAL = tiny_tokenizer().special_tokens


def load(directory: Path, **options: Any) -> ModelText:
    write_kimi_text(directory)
    return load_model_text(directory, cache_chars=10_000, vocab_size=600, **options)


def test_a_conversation_becomes_its_prompt_and_the_form_of_its_answers(tmp_path: Path) -> None:
    text = load(tmp_path)
    assert text.can_call_tools
    assert len(text.token_bytes) == 600
    assert text.stop_token_ids == (SPECIAL["<|im_end|>"], SPECIAL["[EOS]"])
    history: list[dict[str, Any]] = [
        {"role": "user", "content": "hello"},
        {"role": "assistant", "tool_calls": [{"id": "functions.x:7", "function": {"name": "x"}}]},
    ]
    prompt = text.encode(Conversation(history, tools=TOOLS, allows_parallel_calls=False))
    assert prompt.token_ids[-1] == SPECIAL["<think>"]
    form = prompt.form
    assert isinstance(form, KimiOutputForm)
    assert (form.first_call_index, form.is_thinking, form.max_calls, len(form.tools)) == (8, True, 1, 2)
    quiet = text.encode(Conversation(history, thinking={"type": "disabled"}))
    assert quiet.token_ids[-1] == SPECIAL["</think>"]
    assert isinstance(quiet.form, KimiOutputForm)
    assert (quiet.form.is_thinking, quiet.form.max_calls, len(quiet.form.tools)) == (False, None, 0)


def test_the_default_system_message_can_be_switched_on(tmp_path: Path) -> None:
    conversation = Conversation([{"role": "user", "content": "hello"}])
    default = tiny_tokenizer().encode_text(DEFAULT_SYSTEM)
    lengths = []
    for adds in (False, True):
        token_ids = load(tmp_path, adds_default_system=adds).encode(conversation).token_ids
        lengths.append(len(token_ids))
    assert lengths[1] - lengths[0] == len(default) + 3 + len(tiny_tokenizer().encode_text("system"))


@pytest.mark.parametrize(("kind", "word"), [("image_url", "images"), ("video_url", "video")])
def test_what_the_model_would_not_see_is_refused(tmp_path: Path, kind: str, word: str) -> None:
    content = [{"type": "text", "text": "a"}, {"type": kind}]
    with pytest.raises(BadMessageError, match=word) as caught:
        load(tmp_path).encode(Conversation([{"role": "user", "content": content}]))
    assert caught.value.param == "messages[0].content[1]"


@pytest.mark.parametrize(
    "spelling", ["<think>", "<|im_middle|>", "<|tool_call_end|>", "<|media_pad|>", "[EOS]"]
)
def test_a_vocabulary_without_a_special_token_is_refused(tmp_path: Path, spelling: str) -> None:
    write_kimi_text(tmp_path)
    path = tmp_path / "tokenizer_config.json"
    config = json.loads(path.read_text())
    del config["added_tokens_decoder"][str(SPECIAL[spelling])]
    path.write_text(json.dumps(config))
    with pytest.raises(ModelTextError) as caught:
        load_model_text(tmp_path, cache_chars=0, vocab_size=0)
    assert (
        str(caught.value) == f"{tmp_path}: tokenizer_config.json: added_tokens_decoder: {spelling} is missing"
    )


def test_a_missing_file_is_named(tmp_path: Path) -> None:
    write_kimi_text(tmp_path)
    (tmp_path / "tokenizer_config.json").unlink()
    with pytest.raises(ModelTextError, match=r"tokenizer_config\.json: No such file"):
        load_model_text(tmp_path, cache_chars=0, vocab_size=0)
