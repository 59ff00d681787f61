"""Streamed text equals whole text, and no piece of it holds half a character."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from backend.text.detokenizer import Detokenizer
from backend.text.tokenizer import Tokenizer

MULTILINGUAL = [
    "👋🏽", "ď", "삼겹살", "你好，世界", "مرحبا بالعالم", "नमस्ते", "👩‍👩‍👧‍👦 family", "Ångström", "🇰🇷🇸🇪",
    "e\u0301 combining", "𝒜𝓁𝓅𝒽𝒶", "\ufeffbom", "tab\tnew\nline\r\n", "\ufffd honest replacement",
]  # fmt: skip


def stream(tokenizer: Tokenizer, token_ids: list[int]) -> list[str]:
    detokenizer = Detokenizer(tokenizer.token_bytes)
    return [*(detokenizer.push(token_id) for token_id in token_ids), detokenizer.flush()]


@pytest.mark.parametrize("text", MULTILINGUAL)
def test_no_piece_holds_half_a_character(tokenizer: Tokenizer, text: str) -> None:
    pieces = stream(tokenizer, tokenizer.encode_text(text))
    assert "".join(pieces) == text
    assert pieces[-1] == ""
    for piece in pieces:
        assert "\ufffd" not in piece or "\ufffd" in text


@given(text=st.text())
def test_streamed_text_equals_the_text(tokenizer: Tokenizer, text: str) -> None:
    text = text.encode("utf-8", "ignore").decode()
    assert "".join(stream(tokenizer, tokenizer.encode_text(text))) == text


@given(token_ids=st.lists(st.integers(0, 266), max_size=60))
def test_any_token_ids_stream_as_they_decode_whole(tokenizer: Tokenizer, token_ids: list[int]) -> None:
    whole = b"".join(tokenizer.token_bytes[token_id] for token_id in token_ids).decode("utf-8", "replace")
    assert "".join(stream(tokenizer, token_ids)) == whole


def test_a_text_that_ends_inside_a_character_has_one_replacement_at_its_end(tokenizer: Tokenizer) -> None:
    token_ids = tokenizer.encode_text("ok 삼")[:-1]
    pieces = stream(tokenizer, token_ids)
    assert "".join(pieces) == "ok \ufffd"
    assert pieces[-1] == "\ufffd"


def test_control_tokens_show_nothing(tokenizer: Tokenizer) -> None:
    hello = tokenizer.encode_text("hello")
    assert "".join(stream(tokenizer, [1, *hello, 2])) == "hello"
