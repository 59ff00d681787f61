"""What the conversation looks like to the model; the published renderings are compared elsewhere."""

from __future__ import annotations

import itertools
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from backend.text.kimi.template import DEFAULT_SYSTEM, KimiTemplate
from backend.text.kimi.thinking import Thinking
from backend.text.messages import BadMessageError
from tests.support.kimi_text import tiny_tokenizer

TEMPLATE = KimiTemplate()
SPECIALS = [spelling for spelling in tiny_tokenizer().special_tokens if "reserved" not in spelling]


def render(*messages: dict[str, Any], ends: bool = False, **options: Any) -> str:
    return TEMPLATE.render(messages, add_generation_prompt=ends, **options).text


def user(content: Any, **fields: Any) -> dict[str, Any]:
    return {"role": "user", "content": content, **fields}


def call(call_id: Any, name: str, arguments: Any = "{}") -> dict[str, Any]:
    return {"id": call_id, "type": "function", "function": {"name": name, "arguments": arguments}}


def assistant(content: Any = None, calls: Any = None, **fields: Any) -> dict[str, Any]:
    message = {"role": "assistant", "content": content, **fields}
    return message if calls is None else {**message, "tool_calls": calls}


def result(call_id: Any, content: Any = "ok", **fields: Any) -> dict[str, Any]:
    return {"role": "tool", "tool_call_id": call_id, "content": content, **fields}


class TestTurns:
    def test_roles_and_names(self) -> None:
        assert render(
            {"role": "developer", "content": "be brief"},
            user("hi", name="ann"),
            {"role": "system", "content": "x"},
        ) == (
            "<|im_system|>system<|im_middle|>be brief<|im_end|>"
            "<|im_user|>ann<|im_middle|>hi<|im_end|>"
            "<|im_system|>system<|im_middle|>x<|im_end|>"
        )  # fmt: skip

    @pytest.mark.parametrize("content", ["", None, [], [{"type": "text", "text": ""}]])
    def test_empty_content_is_nothing(self, content: Any) -> None:
        """BR-60: neither "None" nor a list's Python form ever shows."""
        assert render(user("a"), assistant(content)) == render(user("a"), assistant(""))

    def test_parts_are_joined_and_an_image_is_followed_by_a_line_break(self) -> None:
        parts = [
            {"type": "text", "text": "a"},
            {"type": "image_url", "image_url": {"url": "data:x"}},
            {"type": "text", "text": "b"},
            {"type": "refusal", "refusal": "no"},
        ]
        prompt = TEMPLATE.render([user(parts)], add_generation_prompt=False)
        assert prompt.text == (
            "<|im_user|>user<|im_middle|>a<|media_begin|>image<|media_content|><|media_pad|><|media_end|>\n"
            "bno<|im_end|>"
        )
        assert [media.path for media in prompt.media] == ["messages[0].content[1]"]
        assert prompt.specials.count("<|media_pad|>") == 1

    def test_an_empty_list_of_calls_is_no_calls(self) -> None:
        """BR-62."""
        assert render(user("a"), assistant("hi", [])) == render(user("a"), assistant("hi"))

    def test_the_default_system_message_is_an_option(self) -> None:
        template = KimiTemplate(adds_default_system=True)
        head = f"<|im_system|>system<|im_middle|>{DEFAULT_SYSTEM}<|im_end|>"
        assert template.render([user("a")]).text == head + TEMPLATE.render([user("a")]).text
        given_one = [{"role": "system", "content": "s"}, user("a")]
        assert template.render(given_one).text == TEMPLATE.render(given_one).text

    @pytest.mark.parametrize(
        ("message", "param"),
        [
            ({"role": "robot", "content": ""}, "messages[1].role"),
            ({"content": ""}, "messages[1].role"),
            (user(7), "messages[1].content"),
            (user([7]), "messages[1].content[0]"),
            (user([{"text": "a"}]), "messages[1].content[0].type"),
            (user([{"type": "text", "text": 7}]), "messages[1].content[0].text"),
            (user([{"type": "input_audio"}]), "messages[1].content[0]"),
            (user([{"type": "strange"}]), "messages[1].content[0].type"),
            (user("a", name=7), "messages[1].name"),
            (assistant("", {"a": 1}), "messages[1].tool_calls"),
            (assistant("", [7]), "messages[1].tool_calls[0].function"),
            (assistant("", [{"function": {}}]), "messages[1].tool_calls[0].function.name"),
            (assistant("", [call(7, "f")]), "messages[1].tool_calls[0].id"),
            (assistant("", reasoning_content=["a"]), "messages[1].reasoning_content"),
            (result(7), "messages[1].tool_call_id"),
        ],
    )
    def test_a_wrong_field_is_named(self, message: dict[str, Any], param: str) -> None:
        with pytest.raises(BadMessageError) as caught:
            render(user("a"), message)
        assert caught.value.param == param

    def test_no_messages_at_all(self) -> None:
        with pytest.raises(BadMessageError, match="at least one message"):
            render()

    def test_tools_nested_without_end_are_refused(self) -> None:
        schema: dict[str, Any] = {}
        for _ in range(3000):
            schema = {"type": "array", "items": schema}
        tools = [{"type": "function", "function": {"name": "f", "parameters": schema}}]
        with pytest.raises(BadMessageError, match="nested too deeply"):
            render(user("a"), tools=tools)


class TestThinking:
    def test_the_answer_begins_in_reasoning_or_behind_it(self) -> None:
        head = "<|im_user|>user<|im_middle|>a<|im_end|><|im_assistant|>assistant<|im_middle|><think>"
        assert render(user("a"), ends=True) == head
        assert render(user("a"), ends=True, thinking=Thinking(is_on=False)) == head + "</think>"

    def test_only_the_running_tool_loop_shows_its_reasoning(self) -> None:
        messages = (
            user("a"),
            assistant("", [call("x", "f")], reasoning_content="old call"),
            result("x"),
            assistant("b", reasoning_content="old answer"),
            user("c"),
            assistant("", [call("y", "f")], reasoning_content="running"),
            result("y"),
        )
        assert [word in render(*messages) for word in ("old call", "old answer", "running")] == [
            False,
            False,
            True,
        ]
        kept = render(*messages, thinking=Thinking(keeps_history=True))
        assert all(f"<think>{word}</think>" in kept for word in ("old call", "old answer", "running"))
        off = render(*messages, thinking=Thinking(is_on=False, keeps_history=True))
        assert off.count("<think></think>") == 3

    def test_reasoning_has_two_names(self) -> None:
        """Complaint C3, C5: both are read; missing, empty or null is fine."""
        shown = [
            render(user("a"), assistant("", [call("x", "f")], **fields))
            for fields in (
                {"reasoning": "r"}, {"reasoning_content": "r"}, {"reasoning_content": "r", "reasoning": "r"},
                {"reasoning_content": None, "reasoning": "r"}, {"reasoning_content": "", "reasoning": "r"},
            )
        ]  # fmt: skip
        assert set(shown) == {shown[0]}
        assert "<think>r</think>" in shown[0]
        without = [
            render(user("a"), assistant("", [call("x", "f")], **fields))
            for fields in ({}, {"reasoning_content": None}, {"reasoning_content": ""})
        ]
        assert set(without) == {without[0]}


class TestCallIds:
    def test_ids_are_native_and_counted_over_the_conversation(self) -> None:
        """Complaint B1: three turns, the same tool, ids of any kind."""
        text = render(
            user("a"),
            assistant(None, [call("call_abc", "get.weather"), call("functions.x:7", "x")]),
            result("functions.x:7"),
            result("call_abc"),
            assistant(None, [call("call_abc", "get.weather", {"größe": 1})]),
            result("call_abc"),
        )
        ids = [
            piece.split("<|tool_call_argument_begin|>")[0] for piece in text.split("<|tool_call_begin|>")[1:]
        ]
        assert ids == ["functions.get.weather:0", "functions.x:1", "functions.get.weather:2"]
        returns = [piece.split("\n")[0] for piece in text.split("## Return of ")[1:]]
        assert returns == ["functions.x:1", "functions.get.weather:0", "functions.get.weather:2"]
        assert '<|tool_call_argument_begin|>{"größe": 1}<|tool_call_end|>' in text

    def test_results_without_an_id_answer_the_calls_in_order(self) -> None:
        for given_id in (None, ""):
            text = render(
                user("a"),
                assistant(None, [call(None, "f"), call("", "g")]),
                result(given_id, name="g"),
                result(given_id),
            )
            returns = [piece.split("\n")[0] for piece in text.split("## Return of ")[1:]]
            assert returns == ["functions.g:1", "functions.f:0"]

    def test_calls_with_the_same_id_are_answered_in_order(self) -> None:
        text = render(user("a"), assistant(None, [call("x", "f"), call("x", "g")]), result("x"), result("x"))
        returns = [piece.split("\n")[0] for piece in text.split("## Return of ")[1:]]
        assert returns == ["functions.f:0", "functions.g:1"]

    def test_a_result_of_a_call_that_is_not_there_keeps_its_id(self) -> None:
        assert "## Return of lost:3\nok" in render(user("a"), result("lost:3"))

    def test_the_older_way_to_call_a_function_is_read(self) -> None:
        old = render(
            user("a"),
            {"role": "assistant", "content": None, "function_call": {"name": "f", "arguments": "{}"}},
            {"role": "function", "name": "f", "content": "ok"},
        )
        new = render(user("a"), assistant(None, [call("x", "f")]), result("x", name="f"))
        assert old == new.replace("<|im_system|>tool<", "<|im_system|>f<")

    def test_missing_arguments_are_an_empty_object(self) -> None:
        assert "<|tool_call_argument_begin|>{}<" in render(user("a"), assistant("", [call("x", "f", None)]))


class TestTextIsNeverSpecial:
    @pytest.mark.parametrize("spelling", SPECIALS)
    def test_wherever_a_spelling_stands_it_stays_text(self, spelling: str) -> None:
        """Here safety wins over equality with the published tokenizer, which makes a special token of it."""
        tokenizer = tiny_tokenizer()

        def conversation(text: str) -> list[dict[str, Any]]:
            return [
                {"role": "system", "content": text},
                user([{"type": "text", "text": text}], name=text),
                assistant(text, [call(text, text or "f", text)], reasoning_content=text),
                result(text, text),
            ]

        tools = [{"type": "function", "function": {"name": "f", "description": f"d{spelling}"}}]
        hostile = TEMPLATE.render(conversation(spelling), tools=tools)
        harmless = TEMPLATE.render(conversation("x"), tools=[{"type": "function", "function": {"name": "f"}}])
        assert hostile.specials == harmless.specials
        token_ids = tokenizer.encode_pieces(hostile.texts, hostile.specials)
        special = set(tokenizer.special_tokens.values())
        assert [token_id for token_id in token_ids if token_id in special] == [
            tokenizer.special_tokens[spelling] for spelling in harmless.specials
        ]
        assert hostile.text.count(spelling) > harmless.text.count(spelling)

    @given(st.lists(st.sampled_from([*SPECIALS, "<|", "|>", "im_end", "a", "\n"]), max_size=6))
    def test_spellings_that_form_at_an_edge_stay_text(self, pieces: list[str]) -> None:
        parts = [{"type": "text", "text": piece} for piece in pieces]
        prompt = TEMPLATE.render([user(parts)])
        assert prompt.specials == TEMPLATE.render([user("a")]).specials


def test_messages_added_at_the_end_leave_the_prompt_before_them() -> None:
    """The prefix cache finds what was said before, reasoning of a running loop included."""
    messages = [
        {"role": "system", "content": "s"},
        user("a"),
        assistant("hm", [call("c1", "f")], reasoning_content="r1"),
        result("c1"),
        assistant(None, [call("c1", "g")], reasoning_content="r2"),
        result("c1"),
    ]
    texts = [render(*messages[:count]) for count in range(2, len(messages) + 1)]
    assert all(after.startswith(before) for before, after in itertools.pairwise(texts))
