"""Kimi's tokenizer: ids as published, text that stays text, and nothing lost on the way back."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from backend.text.detokenizer import Detokenizer
from backend.text.kimi.tokenizer import TiktokenTokenizer, cut_places
from backend.text.tokenizer import BadTokenizerError
from tests.support.kimi_text import tiny_added, tiny_ranks, tiny_tokenizer, write_kimi_text

TEXTS = (
    "삼겹살 먹고 싶다, 오늘 밤에!",
    "今天天气怎么样？请用中文回答。",
    "👋🏽 👩‍👩‍👧‍👦 🏳️‍🌈 ď é ą́",
    "مرحبا بالعالم · Здравствуй, мир · γειά",
    "def f(x):\n\treturn {x: [1, 22, 333, 4444]}  # don't\r\n\r\n",
    "<|im_end|><|im_user|>[BOS]</think><|tool_calls_section_begin|><|reserved_token_163588|>",
    "",
    " ",
)


def decode(tokenizer: TiktokenTokenizer, token_ids: list[int]) -> str:
    """As a stream shows it: a token at a time."""
    detokenizer = Detokenizer(tokenizer.token_bytes)
    pieces = [detokenizer.push(token_id) for token_id in token_ids]
    assert all("\ufffd" not in piece for piece in pieces)
    return "".join(pieces) + detokenizer.flush()


class TestRealVocabulary:
    def test_ids_are_never_closed_up(self, real: TiktokenTokenizer) -> None:
        expected = {
            "[BOS]": 163584, "[EOS]": 163585, "<|im_end|>": 163586, "<|im_user|>": 163587,
            "<|im_assistant|>": 163588, "<|reserved_token_163589|>": 163589, "<|im_system|>": 163594,
            "<|tool_calls_section_begin|>": 163595, "<|tool_call_end|>": 163599, "<|im_middle|>": 163601,
            "<|media_pad|>": 163605, "<think>": 163606, "</think>": 163607, "[UNK]": 163838, "[PAD]": 163839,
        }  # fmt: skip
        assert {spelling: real.special_tokens[spelling] for spelling in expected} == expected
        assert len(real.token_bytes) == 163_840
        assert len(real.special_tokens) == 256

    @pytest.mark.parametrize("text", TEXTS)
    def test_text_comes_back_as_it_was(self, real: TiktokenTokenizer, text: str) -> None:
        token_ids = real.encode_text(text)
        assert decode(real, token_ids) == text
        assert all(token_id < 163_584 for token_id in token_ids)

    @settings(max_examples=200)
    @given(text=st.text(max_size=80))
    def test_any_text_comes_back(self, real: TiktokenTokenizer, text: str) -> None:
        token_ids = real.encode_text(text)
        assert b"".join(real.token_bytes[token_id] for token_id in token_ids) == text.encode()
        assert all(token_id < 163_584 for token_id in token_ids)

    def test_marks_show_in_texts_and_control_tokens_do_not(self, real: TiktokenTokenizer) -> None:
        assert real.token_bytes[163606] == b"<think>"
        assert real.token_bytes[163597] == b"<|tool_call_begin|>"
        assert real.token_bytes[163586] == real.token_bytes[163605] == b""

    def test_long_texts_are_cut_where_the_published_tokenizer_cuts_them(
        self, real: TiktokenTokenizer
    ) -> None:
        # Figures of the published code's rules, written down once: a run is cut after 25,000 characters.
        run = "ab" * 15_000
        assert real.encode_text(run) == real.encode_text(run[:25_000]) + real.encode_text(run[25_000:])
        words = "hello world, " * 40_000
        assert real.encode_text(words) == real.encode_text(words[:400_000]) + real.encode_text(
            words[400_000:]
        )
        # What stands before a text in the prompt counts.
        split = real.encode_pieces(["user", run], ["<|im_middle|>"])
        cut = 25_000 - len("user<|im_middle|>")
        assert split == [
            *real.encode_text("user"), 163601, *real.encode_text(run[:cut]), *real.encode_text(run[cut:]),
        ]  # fmt: skip


@given(st.text(max_size=200))
def test_any_text_comes_back_and_no_text_is_special(text: str) -> None:
    tokenizer = tiny_tokenizer()
    token_ids = tokenizer.encode_text(text)
    assert b"".join(tokenizer.token_bytes[token_id] for token_id in token_ids) == text.encode()
    assert not set(token_ids) & set(tokenizer.special_tokens.values())


@given(st.text(st.sampled_from("삼겹살👋🏽中文ďé a"), max_size=60))
def test_a_stream_never_shows_half_a_character(text: str) -> None:
    """BR-52, BR-54: the deltas joined are the text, and no delta holds a replacement character."""
    tokenizer = tiny_tokenizer()
    assert decode(tokenizer, tokenizer.encode_text(text)) == text


@given(
    st.lists(st.text("ab <|im_end>/think", max_size=12), min_size=1, max_size=5),
    st.lists(st.sampled_from(["<|im_end|>", "<think>", "</think>"]), min_size=4, max_size=4),
)
def test_pieces_are_encoded_alone(texts: list[str], specials: list[str]) -> None:
    tokenizer = tiny_tokenizer()
    specials = specials[: len(texts) - 1]
    expected = tokenizer.encode_text(texts[0])
    for special, text in zip(specials, texts[1:], strict=True):
        expected += [tokenizer.special_tokens[special], *tokenizer.encode_text(text)]
    assert tokenizer.encode_pieces(texts, specials) == expected


@given(st.text(" \n\u3000ab", max_size=120), st.integers(5, 40), st.integers(1, 6))
def test_runs_are_cut_where_reading_every_character_cuts_them(
    text: str, max_chars: int, max_run: int
) -> None:
    expected = []
    length = 0
    for place, character in enumerate(text):
        is_new_slice = place % max_chars == 0
        if is_new_slice or character.isspace() != text[place - 1].isspace():
            length = 0
        if place and (is_new_slice or length == max_run):
            expected.append(place)
            length = 0
        length += 1
    assert cut_places(text, max_chars, max_run) == expected


def test_a_long_run_is_cut_whatever_the_cache_knows(tiny: TiktokenTokenizer) -> None:
    fresh = TiktokenTokenizer(tiny_ranks(), tiny_added(), cache_chars=0)
    for text in (" " * 60_000, "x" * 60_000, ("y" * 30_000 + " ") * 3, "z " * 20_000):
        once = tiny.encode_text(text)
        assert tiny.encode_text(text) == once == fresh.encode_text(text)
        assert b"".join(tiny.token_bytes[token_id] for token_id in once) == text.encode()


def test_lone_surrogates_do_not_fail(tiny: TiktokenTokenizer) -> None:
    assert tiny.encode_text("a\ud800b")


def test_a_larger_model_vocabulary_has_bytes_for_every_id() -> None:
    assert TiktokenTokenizer(tiny_ranks(), {}, cache_chars=0, vocab_size=1000).token_bytes[999] == b""


class TestFiles:
    def test_a_directory_gives_the_tokenizer(self, tmp_path: Path, tiny: TiktokenTokenizer) -> None:
        write_kimi_text(tmp_path)
        loaded = TiktokenTokenizer.from_directory(tmp_path, cache_chars=0)
        assert loaded.special_tokens == tiny.special_tokens
        assert loaded.token_bytes == tiny.token_bytes

    @pytest.mark.parametrize(
        ("name", "content", "problem"),
        [
            ("tiktoken.model", None, "tiktoken.model: No such file"),
            ("tiktoken.model", "YQ== 0\nYg==\n", "line 2 is not a token and its id"),
            ("tiktoken.model", "YQ== 0\n!!! 1\n", "line 2 is not a token and its id"),
            ("tiktoken.model", "YQ== 0\nYg== 2\n", "ids must be 0 to 1, each once"),
            ("tokenizer_config.json", None, "tokenizer_config.json: No such file"),
            ("tokenizer_config.json", "{", "tokenizer_config.json: added_tokens_decoder: not as expected"),
            ("tokenizer_config.json", "{}", "added_tokens_decoder is missing"),
            ("tokenizer_config.json", '{"added_tokens_decoder": []}', "not as expected"),
            ("tokenizer_config.json", '{"added_tokens_decoder": {"300": {}}}', "content is missing"),
            (
                "tokenizer_config.json",
                '{"added_tokens_decoder": {"300": {"content": 1}}}',
                "needs its content",
            ),
            ("tokenizer_config.json", '{"added_tokens_decoder": {"3": {"content": "x"}}}', "no special slot"),
        ],
    )
    def test_a_bad_file_is_named(self, tmp_path: Path, name: str, content: str | None, problem: str) -> None:
        write_kimi_text(tmp_path)
        (tmp_path / name).unlink()
        if content is not None:
            (tmp_path / name).write_text(content)
        with pytest.raises(BadTokenizerError, match=problem):
            TiktokenTokenizer.from_directory(tmp_path, cache_chars=0)

    def test_two_tokens_with_one_spelling_are_refused(self, tmp_path: Path) -> None:
        write_kimi_text(tmp_path)
        path = tmp_path / "tokenizer_config.json"
        config = json.loads(path.read_text())
        config["added_tokens_decoder"][str(len(tiny_ranks()) + 5)] = {"content": "[BOS]", "special": True}
        path.write_text(json.dumps(config))
        with pytest.raises(BadTokenizerError, match="two tokens have the same content"):
            TiktokenTokenizer.from_directory(tmp_path, cache_chars=0)
