"""The one pipeline from tokens to shown text: counts, reasons and log probabilities."""

from __future__ import annotations

import itertools

import pytest
from hypothesis import given
from hypothesis import strategies as st

from backend.engine.messages import SequenceFinish, TokenLogprobs, TokenOutput
from backend.text.output import ChoiceText
from backend.text.stop_strings import StopStrings
from backend.text.tokenizer import Tokenizer


def outputs(
    token_ids: list[int], cuts: list[int], finish: SequenceFinish = "length", logprobs: bool = False
) -> list[TokenOutput]:
    """Cut token ids into outputs at the given places."""
    edges = sorted({0, len(token_ids), *(cut for cut in cuts if cut < len(token_ids))})
    spans = list(itertools.pairwise(edges)) or [(0, 0)]
    return [
        TokenOutput(
            sequence_id=1,
            token_ids=token_ids[start:end],
            finish_reason=finish if (start, end) == spans[-1] else None,
            logprobs=[TokenLogprobs(t, -0.5) for t in token_ids[start:end]] if logprobs else None,
        )
        for start, end in spans
    ]


def read(choice: ChoiceText, chunks: list[TokenOutput]) -> tuple[list[str], list[int]]:
    shown: list[str] = []
    logprobs: list[int] = []
    for chunk in chunks:
        shown.append(choice.push(chunk))
        logprobs += [entry.token_id for entry in choice.take_logprobs()]
        if choice.finish_reason is not None:
            break
    return shown, logprobs


def test_the_stop_token_is_counted_and_not_shown(tokenizer: Tokenizer) -> None:
    choice = ChoiceText(tokenizer.token_bytes)
    letter = tokenizer.encode_text("x")[0]
    # An ordinary token can be a stop token too; it is no text then either.
    shown, _ = read(choice, outputs([*tokenizer.encode_text("hello"), letter], [1], "stop"))
    assert "".join(shown) == "hello"
    assert choice.num_tokens == 2
    assert choice.finish_reason == "stop"


def test_a_stop_string_ends_the_count_at_its_last_token(tokenizer: Tokenizer) -> None:
    choice = ChoiceText(tokenizer.token_bytes, StopStrings(["c"]))
    shown, _ = read(choice, outputs(tokenizer.encode_text("abcdef"), []))
    assert "".join(shown) == "ab"
    assert choice.num_tokens == 3
    assert choice.finish_reason == "stop"


def test_a_stop_string_at_the_length_limit_is_a_stop(tokenizer: Tokenizer) -> None:
    choice = ChoiceText(tokenizer.token_bytes, StopStrings(["bc"]))
    read(choice, outputs(tokenizer.encode_text("abc"), [1, 2], "length"))
    assert choice.finish_reason == "stop"


def test_held_text_is_shown_when_the_answer_is_cut(tokenizer: Tokenizer) -> None:
    choice = ChoiceText(tokenizer.token_bytes, StopStrings(["bcd"]))
    shown, _ = read(choice, outputs(tokenizer.encode_text("abc"), [1, 2], "length"))
    assert "".join(shown) == "abc"
    assert choice.finish_reason == "length"


def test_log_probabilities_of_a_cut_stop_string_do_not_show(tokenizer: Tokenizer) -> None:
    token_ids = tokenizer.encode_text("abcd")
    choice = ChoiceText(tokenizer.token_bytes, StopStrings(["cd"]))
    _, logprobs = read(choice, outputs(token_ids, [1, 2, 3], logprobs=True))
    assert logprobs == token_ids[:2]


def test_log_probabilities_of_half_a_character_come_with_the_character(tokenizer: Tokenizer) -> None:
    token_ids = tokenizer.encode_text("삼")
    assert len(token_ids) == 3
    choice = ChoiceText(tokenizer.token_bytes)
    chunks = outputs([*token_ids, 2], [1, 2, 3], "stop", logprobs=True)
    seen = [(choice.push(chunk), len(choice.take_logprobs())) for chunk in chunks]
    assert seen == [("", 0), ("", 0), ("삼", 3), ("", 0)]


def test_a_cut_answer_has_the_log_probabilities_of_all_its_tokens(tokenizer: Tokenizer) -> None:
    token_ids = tokenizer.encode_text("a삼")[:-1]
    choice = ChoiceText(tokenizer.token_bytes)
    shown, logprobs = read(choice, outputs(token_ids, [1, 2], logprobs=True))
    assert "".join(shown) == "a\ufffd"
    assert logprobs == token_ids


def test_an_abort_before_the_first_token_is_an_empty_text(tokenizer: Tokenizer) -> None:
    choice = ChoiceText(tokenizer.token_bytes)
    assert read(choice, [TokenOutput(sequence_id=1, finish_reason="abort")]) == ([""], [])
    assert choice.finish_reason == "abort"
    assert choice.num_tokens == 0


@pytest.mark.parametrize("finish", ["stop", "length", "abort"])
@given(
    text=st.text("abc삼👋", max_size=12),
    stops=st.lists(st.text("abc삼", min_size=1, max_size=3), max_size=2),
    cuts=st.lists(st.integers(0, 30), max_size=8),
)
def test_how_tokens_are_delivered_makes_no_difference(
    tokenizer: Tokenizer, finish: SequenceFinish, text: str, stops: list[str], cuts: list[int]
) -> None:
    token_ids = tokenizer.encode_text(text)
    if finish == "stop":
        token_ids = [*token_ids, 2]
    results = []
    for places in (cuts, [], list(range(len(token_ids)))):
        choice = ChoiceText(tokenizer.token_bytes, StopStrings(stops) if stops else None)
        shown, logprobs = read(choice, outputs(token_ids, places, finish, logprobs=True))
        results.append(("".join(shown), logprobs, choice.num_tokens, choice.finish_reason))
    assert results[0] == results[1] == results[2]
    assert "\ufffd" not in results[0][0]
