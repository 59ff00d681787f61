"""The same message for every split of the token stream, and for every stop string that does not match."""

from __future__ import annotations

import json

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from backend.engine.messages import SequenceFinish
from backend.text.kimi.call_ids import native_id
from backend.text.kimi.marks import Mark
from backend.text.kimi.parser import KimiOutputForm
from tests.support.kimi_answers import END, TOOLS, call, make_form, read_tokens, section
from tests.support.kimi_text import spoken, tiny_tokenizer

WEATHER = call("functions.get_weather:0", '{"city": "서울 👋🏽", "days": 3}')
FILE = call("functions.fs.read-file:v2:1", '{"path": "a/b.py"}')
ANSWERS = (
    "생각 중입니다.\n</think>안녕하세요 👋🏽 ď!",
    f"Ich überlege</think>Moment.\n{section(WEATHER, FILE)} Danke {{x}}",
    f"no end of reasoning{section(FILE)}",
    f"bare</think>{WEATHER}{FILE}\n",
    section(call("3", '{"path": "x"}'), call("call_00", "")),
    section(call("functions.get_weather:0", '{"city": "cut')),
    f"<think>a</think>b<|tool_call_section_begin|>{WEATHER}<|tool_call_section_end|>c",
)
MARKS = [mark.value for mark in Mark]
# Short texts of everything that could be taken for something else, and halves of it.
TEXTS = (
    "a",
    " ",
    "\n",
    "삼",
    "👋🏽",
    "{",
    "}",
    '"',
    "<",
    "<|",
    "</think",
    "3",
    "functions.get_weather:0",
    '{"city": "x"}',
)


@pytest.mark.parametrize("finish", ["stop", "length"])
@pytest.mark.parametrize("answer", ANSWERS)
def test_every_two_way_split_gives_the_same_message(answer: str, finish: SequenceFinish) -> None:
    """BR-41: the name without its arguments was what some splits left."""
    token_ids = spoken(answer + (END if finish == "stop" else ""))
    whole = read_tokens(token_ids, finish=finish)
    assert whole == read_tokens(token_ids, range(len(token_ids)), finish=finish)
    for cut in range(1, len(token_ids)):
        assert read_tokens(token_ids, [cut], finish=finish) == whole


@settings(max_examples=300)
@given(
    pieces=st.lists(st.sampled_from([*MARKS, *TEXTS]), max_size=16),
    cuts=st.lists(st.integers(0, 80), max_size=12),
    finish=st.sampled_from(["stop", "length", "abort"]),
    stops=st.sampled_from(
        [(), ("zzz",), ("<|im_end|>", "}}"), ('x"}',), ("</think>",), ("> ",), ("삼", "call")]
    ),
    form=st.sampled_from(
        [
            make_form(),
            make_form(is_thinking=False, first_call_index=5),
            make_form(tools=[]),
            make_form(tools=TOOLS[:1], max_calls=1),
            make_form(vocabulary={}),
        ]
    ),
)
def test_anything_said_in_any_pieces_gives_the_same_message(
    pieces: list[str], cuts: list[int], finish: SequenceFinish, stops: tuple[str, ...], form: KimiOutputForm
) -> None:
    said = "".join(pieces)
    token_ids = spoken(said) if form.marks.by_id else tiny_tokenizer().encode_text(said)
    if finish == "stop":
        token_ids = [*token_ids, tiny_tokenizer().special_tokens[END]]
    whole = read_tokens(token_ids, form=form, stops=stops, finish=finish)
    for places in (cuts, range(len(token_ids))):
        assert read_tokens(token_ids, places, form=form, stops=stops, finish=finish) == whole
    assert whole.num_reasoning_tokens <= whole.num_tokens
    if finish != "abort":
        assert (whole.finish_reason == "tool_calls") == bool(whole.ids)
    if form.marks.by_id:
        assert not any(mark in whole.reasoning + whole.content for mark in MARKS)
    broken = {index for index, *_ in whole.failures}
    for index, arguments in enumerate(whole.arguments):
        if index not in broken:
            assert isinstance(json.loads(arguments), dict)


@settings(max_examples=150)
@given(
    pieces=st.lists(st.sampled_from([*MARKS, *TEXTS]), max_size=12),
    finish=st.sampled_from(["stop", "length"]),
)
def test_a_stop_string_that_never_comes_changes_nothing(pieces: list[str], finish: SequenceFinish) -> None:
    token_ids = spoken("".join(pieces) + (END if finish == "stop" else ""))
    without = read_tokens(token_ids, finish=finish)
    for stops in (("<|never",), ("</think>Q", "}Q", "\nQ"), ("<Q", " Q", "👋Q", '"Q')):
        assert read_tokens(token_ids, finish=finish, stops=stops) == without
        assert read_tokens(token_ids, range(len(token_ids)), finish=finish, stops=stops) == without


def words(alphabet: str) -> st.SearchStrategy[str]:
    return st.text(alphabet, min_size=1, max_size=12).filter(lambda text: text.strip() == text)


VALUES = st.text('a"\\{}<|>삼\n ', max_size=12) | st.integers() | st.none() | st.lists(st.booleans())
ARGUMENTS = st.dictionaries(words("abc_ü"), VALUES, max_size=3)


@pytest.mark.slow
@settings(max_examples=150)
@given(
    reasoning=words("ab 삼{}<|\n") | st.just(""),
    content=words("cd 👋{}<|\n") | st.just(""),
    calls=st.lists(st.tuples(st.sampled_from(["get_weather", "fs.read-file:v2"]), ARGUMENTS), max_size=3),
    after=words("ef {x}") | st.just(""),
    first=st.integers(0, 99),
    cuts=st.lists(st.integers(0, 200), max_size=8),
)
def test_what_a_well_behaved_model_says_is_what_is_read(
    reasoning: str,
    content: str,
    calls: list[tuple[str, dict[str, object]]],
    after: str,
    first: int,
    cuts: list[int],
) -> None:
    said = [(name, json.dumps(arguments, ensure_ascii=False)) for name, arguments in calls]
    answer = f"{reasoning}</think>{content}"
    if said:
        answer += section(*(call(native_id(name, first + i), text) for i, (name, text) in enumerate(said)))
        answer += after
    message = read_tokens(spoken(answer + END), cuts, form=make_form(first_call_index=first))
    assert message.reasoning == reasoning
    assert message.content == content + (after if said else "")
    assert message.calls == said
    assert message.ids == [native_id(name, first + index) for index, (name, _) in enumerate(said)]
    assert message.failures == []
    assert message.finish_reason == ("tool_calls" if said else "stop")
    assert message.num_tokens == len(spoken(answer + END))
