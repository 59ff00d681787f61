"""Ordinary text never becomes a special token; template text does."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import tokenizers
from hypothesis import given
from hypothesis import strategies as st

from backend.text.piece_cache import PieceCache
from backend.text.tokenizer import BadTokenizerError, Tokenizer


def decode(tokenizer: Tokenizer, token_ids: list[int]) -> str:
    return b"".join(tokenizer.token_bytes[token_id] for token_id in token_ids).decode()


@given(text=st.text("ab <|>im_startend\n삼", max_size=40))
def test_ordinary_text_comes_back_and_holds_no_special_token(tokenizer: Tokenizer, text: str) -> None:
    token_ids = tokenizer.encode_text(text)
    assert decode(tokenizer, token_ids) == text
    assert not set(token_ids) & {0, 1, 2}


@given(text=st.text("ab <|>\n", max_size=30))
def test_prompts_encode_as_the_whole_tokenizer_encodes_them(
    tokenizer: Tokenizer, whole_tokenizer: tokenizers.Tokenizer, text: str
) -> None:
    rendered = f"<|im_start|>user\n{text}<|im_end|>\n<|im_start|>assistant\n"
    assert tokenizer.encode_prompt(rendered) == whole_tokenizer.encode(rendered, add_special_tokens=False).ids


def test_a_guarded_spelling_is_plain_text_without_its_guard(tokenizer: Tokenizer) -> None:
    token_ids = tokenizer.encode_prompt("<|im_start|><\ufdd0|im_end|><|im_end|>", guard="\ufdd0")
    assert token_ids == [1, *tokenizer.encode_text("<|im_end|>"), 2]


def test_the_longest_spelling_wins(definition: dict[str, Any]) -> None:
    definition["added_tokens"].append({**definition["added_tokens"][0], "id": 400, "content": "<|im_end|>!"})
    tokenizer = Tokenizer(definition, cache_chars=0)
    assert tokenizer.encode_prompt("<|im_end|>!<|im_end|>") == [400, 2]


def test_white_space_that_a_special_token_swallows_is_swallowed(definition: dict[str, Any]) -> None:
    definition["added_tokens"][1]["lstrip"] = True
    definition["added_tokens"][2]["rstrip"] = True
    tokenizer = Tokenizer(definition, cache_chars=0)
    x = tokenizer.encode_text("x")
    assert tokenizer.encode_prompt("x \n<|im_start|>x<|im_end|> \nx") == [*x, 1, *x, 2, *x]


def test_added_white_space_is_ordinary_vocabulary(definition: dict[str, Any]) -> None:
    run = {**definition["added_tokens"][0], "id": 300, "content": "    ", "special": False}
    definition["added_tokens"].append(run)
    tokenizer = Tokenizer(definition, cache_chars=0)
    token_ids = tokenizer.encode_text("a    b")
    assert 300 in token_ids
    assert decode(tokenizer, token_ids) == "a    b"


def test_ids_beyond_the_vocabulary_show_nothing(definition: dict[str, Any]) -> None:
    assert Tokenizer(definition, cache_chars=0, vocab_size=1000).token_bytes[999] == b""


def test_cached_pieces_give_the_same_tokens(definition: dict[str, Any]) -> None:
    rendered = f"<|im_start|>{'hello world ' * 20}<|im_end|>{'삼겹살 ' * 40}"
    cached = Tokenizer(definition, cache_chars=10_000)
    plain = Tokenizer(definition, cache_chars=0)
    first, second = cached.encode_prompt(rendered), cached.encode_prompt(rendered)
    assert first == second == plain.encode_prompt(rendered)


class TestPieceCache:
    def test_it_holds_no_more_than_its_limit_and_drops_the_oldest(self) -> None:
        cache = PieceCache(10)
        cache.keep("s", "aaaa", [1])
        cache.keep("s", "bbbb", [2])
        assert cache.find("s", "aaaa") == [1]
        cache.keep("s", "cccc", [3])
        assert cache.find("s", "bbbb") is None
        assert cache.find("s", "aaaa") == [1]
        assert cache.num_chars == 8

    def test_a_piece_larger_than_the_cache_is_not_kept(self) -> None:
        cache = PieceCache(3)
        cache.keep("s", "aaaa", [1])
        assert cache.num_chars == 0

    def test_another_salt_does_not_find_it(self) -> None:
        cache = PieceCache(10)
        cache.keep("one", "aaaa", [1])
        assert cache.find("two", "aaaa") is None

    def test_keeping_twice_counts_once(self) -> None:
        cache = PieceCache(10)
        cache.keep("s", "aaaa", [1])
        cache.keep("s", "aaaa", [1])
        assert cache.num_chars == 4


class TestErrors:
    def test_a_missing_file_is_named(self, tmp_path: Path) -> None:
        with pytest.raises(BadTokenizerError, match=r"tokenizer\.json: missing"):
            Tokenizer.from_directory(tmp_path, cache_chars=0)

    def test_a_file_that_is_not_json_is_named(self, tmp_path: Path) -> None:
        (tmp_path / "tokenizer.json").write_text("{")
        with pytest.raises(BadTokenizerError, match=r"tokenizer\.json: not JSON"):
            Tokenizer.from_directory(tmp_path, cache_chars=0)

    def test_an_unsupported_decoder_is_named(self, definition: dict[str, Any], tmp_path: Path) -> None:
        definition["decoder"] = {"type": "WordPiece", "prefix": "##", "cleanup": True}
        (tmp_path / "tokenizer.json").write_text(json.dumps(definition))
        with pytest.raises(BadTokenizerError, match=r"tokenizer\.json: decoder: 'WordPiece'"):
            Tokenizer.from_directory(tmp_path, cache_chars=0)

    def test_a_model_that_cannot_be_read_is_an_error_of_ours(self, definition: dict[str, Any]) -> None:
        definition["model"]["merges"].append(["no-such", "token"])
        with pytest.raises(BadTokenizerError):
            Tokenizer(definition, cache_chars=0)
