"""Reasoning and tool calls: what each way of saying them comes to. Known failures have a test each."""

from __future__ import annotations

import json
from typing import Any

import pytest

from tests.support.kimi_answers import (
    ARGUMENTS,
    CALL,
    CALL_END,
    SECTION,
    SECTION_END,
    TOOLS,
    call,
    make_form,
    read,
    read_tokens,
    section,
)
from tests.support.kimi_text import spoken, tiny_tokenizer

WEATHER = call("functions.get_weather:0", '{"city": "Bonn"}')
FILE = call("functions.fs.read-file:v2:1", '{"path": "a.py"}')
INSTANT = make_form(is_thinking=False)


class TestReasoning:
    def test_reasoning_then_content(self) -> None:
        message = read("Let me see.</think>It is 18 °C.")
        assert (message.reasoning, message.content) == ("Let me see.", "It is 18 °C.")
        assert message.finish_reason == "stop"

    def test_white_space_at_its_end_is_dropped_and_inside_it_is_kept(self) -> None:
        assert read("  a \n b \n\n</think>c").reasoning == "  a \n b"
        assert read("a \n\n", finish="length").reasoning == "a"

    def test_a_repeated_begin_is_swallowed(self) -> None:
        assert read("<think>a</think>b").reasoning == "a"
        assert read("a<think>b</think>c").reasoning == "ab"

    def test_thinking_off_is_content_only(self) -> None:
        """The answer never lands in reasoning, whatever marks the model writes."""
        for answer in ("It is.", "</think>It is.", "<think>It is.", "<think></think>It is."):
            message = read(answer, form=INSTANT)
            assert (message.reasoning, message.content) == ("", "It is.")
            assert message.num_reasoning_tokens == 0

    def test_a_cut_inside_reasoning_leaves_no_content(self) -> None:
        message = read("thinking still", finish="length")
        assert (message.reasoning, message.content, message.finish_reason) == ("thinking still", "", "length")

    def test_the_model_may_think_again(self) -> None:
        message = read(f"a</think>b{section(WEATHER)}<think>c</think>d")
        assert (message.reasoning, message.content) == ("ac", "bd")
        assert len(message.calls) == 1

    @pytest.mark.parametrize(
        ("answer", "reasoning"),
        [
            ("abc</think>def", "abc</think>"),
            ("<think>abc</think>def", "<think>abc</think>"),
            (f"abc{section(WEATHER)}", "abc"),
            (f"abc{WEATHER}", "abc"),
            ("abc", "abc"),
            ("</think>def", "</think>"),
            (f"ab</think>c{section(WEATHER)}<think>d</think>e", "ab</think><think>d</think>"),
            (
                "a</think>" + section(call("functions.get_weather:0", '{"city": "<think>x</think>"}')),
                "a</think>",
            ),
        ],
    )
    def test_reasoning_tokens_are_counted_with_the_marks_around_them(
        self, answer: str, reasoning: str
    ) -> None:
        assert read(answer).num_reasoning_tokens == len(spoken(reasoning))

    def test_a_stop_string_that_holds_text_back_does_not_change_the_count(self) -> None:
        answer = "some thought</think>some answer"
        for stops in (
            (),
            ("xyz",),
            ("answer",),
            ("ght</think>some a",),
            ("thought</think>some answer and more",),
        ):
            assert read(answer, stops=stops).num_reasoning_tokens == len(spoken("some thought</think>"))


class TestCalls:
    def test_parallel_calls(self) -> None:
        message = read(f"hm</think>I look.{section(WEATHER, FILE)}")
        assert message.content == "I look."
        assert message.ids == ["functions.get_weather:0", "functions.fs.read-file:v2:1"]
        assert message.calls == [("get_weather", '{"city": "Bonn"}'), ("fs.read-file:v2", '{"path": "a.py"}')]
        assert message.finish_reason == "tool_calls"
        assert message.failures == []

    def test_ids_go_on_counting_where_the_conversation_is(self) -> None:
        """Complaint B1: models number each turn from 0."""
        message = read(section(WEATHER, WEATHER), form=make_form(first_call_index=7))
        assert message.ids == ["functions.get_weather:7", "functions.get_weather:8"]

    def test_a_call_ends_reasoning_that_was_not_ended(self) -> None:
        for answer in (section(WEATHER), WEATHER):
            message = read(f"I must look it up.\n{answer}")
            assert message.reasoning == "I must look it up."
            assert message.names == ["get_weather"]
            assert message.content == ""

    def test_calls_need_no_section(self) -> None:
        message = read(f"</think>{WEATHER}{FILE}done")
        assert message.names == ["get_weather", "fs.read-file:v2"]
        assert message.content == "done"

    def test_section_marks_in_the_singular_are_left_out(self) -> None:
        for begin, end in (("<|tool_call_section_begin|>", "<|tool_call_section_end|>"),):
            message = read(f"a</think>b{begin}{WEATHER}{end}")
            assert (message.reasoning, message.content, message.names) == ("a", "b", ["get_weather"])

    def test_white_space_beside_calls_is_no_content(self) -> None:
        message = read(f"a</think>\n\n{SECTION}\n{WEATHER}\n\n{FILE}\n{SECTION_END}\n")
        assert message.content == ""
        assert len(message.calls) == 2

    def test_no_content_comes_behind_a_call_for_white_space(self) -> None:
        assert read(f"a</think>Looking. \n{section(WEATHER)} \n").content == "Looking. \n"

    def test_text_around_calls_is_kept(self) -> None:
        """BR-47, complaint B5: prose with braces behind a call, between calls, and before the first."""
        message = read(f"</think>A{SECTION}B {{b}}{WEATHER}; C{FILE} and {{x}}{SECTION_END}D {{d}}")
        assert message.content == "AB {b}; C and {x}D {d}"
        assert len(message.calls) == 2
        assert message.reasoning == ""

    def test_arguments_are_passed_on_as_they_are(self) -> None:
        arguments = '{"city": "Zürich\\n\\"삼\\"", "days":   2, "extra": [1, {"a": "}"}]}\n'
        message = read(section(call("functions.get_weather:0", arguments)))
        assert message.calls == [("get_weather", arguments)]
        assert message.failures == []

    def test_long_arguments_are_neither_cut_nor_withheld(self) -> None:
        """BR-43: no limit on their length; each piece is passed on when it comes."""
        arguments = json.dumps({"city": "x" * 9_000})
        token_ids = spoken(section(call("functions.get_weather:0", arguments)))
        message = read_tokens(token_ids, range(len(token_ids)), finish="length")
        assert message.calls == [("get_weather", arguments)]

    def test_each_token_of_arguments_is_passed_on_at_once(self) -> None:
        token_ids = spoken(SECTION + CALL + "functions.get_weather:0" + ARGUMENTS + '{"city": ')
        parser = make_form().new_parser()
        for token_id in token_ids[:-3]:
            parser.feed(token_id, tiny_tokenizer().token_bytes[token_id].decode())
        parser.take_parts()
        for token_id in token_ids[-3:]:
            parser.feed(token_id, tiny_tokenizer().token_bytes[token_id].decode())
            assert len(parser.take_parts()) == 1

    def test_no_arguments_are_an_empty_object(self) -> None:
        for answer in (
            section(call("functions.get_weather:0", "")), section(call("functions.get_weather:0", " \n")),
            f"{CALL}functions.get_weather:0{CALL_END}", f"{CALL}functions.get_weather:0{SECTION_END}",
            f"{CALL}functions.get_weather:0", f"{CALL}functions.get_weather:0{ARGUMENTS}",
        ):  # fmt: skip
            message = read(answer)
            assert message.calls == [("get_weather", "{}")]
            assert message.failures == []

    @pytest.mark.parametrize("end", ["", SECTION_END, CALL_END, CALL_END + SECTION_END])
    def test_a_call_that_is_not_ended_is_a_call(self, end: str) -> None:
        message = read(f'{SECTION}{CALL}functions.get_weather:0{ARGUMENTS}{{"city": "Bonn"}}{end}')
        assert message.calls == [("get_weather", '{"city": "Bonn"}')]
        assert message.failures == []

    def test_the_next_call_ends_the_one_before(self) -> None:
        message = read(f"{SECTION}{WEATHER.removesuffix(CALL_END)}{FILE.removesuffix(CALL_END)}{SECTION_END}")
        assert message.names == ["get_weather", "fs.read-file:v2"]
        assert message.failures == []

    def test_a_call_without_its_first_mark_is_found(self) -> None:
        message = read(
            f'{SECTION}\nfunctions.get_weather:0{ARGUMENTS}{{"city": "Bonn"}}{CALL_END}{SECTION_END}'
        )
        assert message.calls == [("get_weather", '{"city": "Bonn"}')]
        assert message.content == ""

    def test_arguments_right_behind_the_id_are_found(self) -> None:
        message = read(f'{SECTION}{CALL}functions.get_weather:0{{"city": "Bonn"}}{CALL_END}{SECTION_END}')
        assert message.calls == [("get_weather", '{"city": "Bonn"}')]

    def test_arguments_may_speak_of_marks(self) -> None:
        arguments = '{"path": "<think>x</think> <|tool_call_section_begin|>"}'
        assert read(section(call("functions.fs.read-file:v2:0", arguments))).arguments == [arguments]

    def test_a_text_that_spells_marks_is_no_call(self) -> None:
        """What a user asked for comes back as ordinary tokens and stays text."""
        answer = f"</think>{section(WEATHER)}"
        token_ids = [*spoken("</think>"), *tiny_tokenizer().encode_text(section(WEATHER))]
        message = read_tokens(token_ids, finish="length")
        assert message.content == answer.removeprefix("</think>")
        assert message.calls == []

    def test_sections_may_follow_each_other(self) -> None:
        message = read(f"{section(WEATHER)}and{section(FILE)}")
        assert message.names == ["get_weather", "fs.read-file:v2"]
        assert message.content == "and"

    def test_one_call_at_a_time_ends_the_answer_where_a_second_begins(self) -> None:
        message = read(f"{section(WEATHER, FILE)}x", form=make_form(max_calls=1))
        assert message.calls == [("get_weather", '{"city": "Bonn"}')]
        assert message.finish_reason == "tool_calls"
        assert message.num_tokens == len(spoken(SECTION + WEATHER)) + 1

    def test_white_space_alone_is_an_answer(self) -> None:
        assert read("a</think>\n\n").content == "\n\n"
        assert read("\n\n", form=INSTANT).content == "\n\n"

    def test_stray_marks_are_left_out(self) -> None:
        answer = f"a{CALL_END}{SECTION_END}{ARGUMENTS}b</think>c{CALL_END}{SECTION_END}{ARGUMENTS}</think>d"
        message = read(answer)
        assert (message.reasoning, message.content) == ("ab", "cd")
        assert message.finish_reason == "stop"


class TestFailures:
    """Arguments are valid JSON, or it is said that they are not."""

    @pytest.mark.parametrize("arguments", ['{"city": ', "[1]", '"x"', "{} {}", "{'city': 1}", '{"a": NaN}'])
    def test_arguments_that_are_no_json_object(self, arguments: str) -> None:
        message = read(section(call("functions.get_weather:0", arguments), FILE))
        assert message.arguments[0] == arguments
        assert message.failures == [(0, "invalid_arguments", "", "")]
        assert message.finish_reason == "tool_calls"

    def test_arguments_that_were_cut(self) -> None:
        message = read(f'{SECTION}{CALL}functions.get_weather:0{ARGUMENTS}{{"city": "Bo', finish="length")
        assert message.arguments == ['{"city": "Bo']
        assert message.failures == [(0, "incomplete", "", "")]
        assert message.finish_reason == "tool_calls"

    def test_cut_before_any_argument_is_not_a_call_without_arguments(self) -> None:
        message = read(f"{SECTION}{CALL}functions.get_weather:0{ARGUMENTS}", finish="length")
        assert message.arguments == [""]
        assert message.failures == [(0, "incomplete", "", "")]

    def test_an_id_that_was_cut_is_no_call(self) -> None:
        message = read(f"{SECTION}{CALL}functions.get_wea", finish="length")
        assert message.calls == []
        assert message.failures == [(None, "incomplete", "functions.get_wea", "")]
        assert message.finish_reason == "length"

    def test_an_id_that_names_nothing(self) -> None:
        message = read(section(call("3", '{"neither": 1}')))
        assert message.calls == []
        assert message.failures == [(None, "unknown_tool", "3", '{"neither": 1}')]
        assert message.finish_reason == "stop"

    @pytest.mark.parametrize("said_id", ["functions.I will look:0", "functions." + "x" * 300])
    def test_what_can_be_no_name(self, said_id: str) -> None:
        message = read(section(call(said_id, '{"neither": 1}')))
        assert message.calls == []
        assert message.failures == [(None, "unknown_tool", said_id, '{"neither": 1}')]

    def test_without_tools_nothing_is_called(self) -> None:
        message = read(f"a</think>b{section(WEATHER)}c", form=make_form(tools=[]))
        assert message.calls == []
        assert message.content == "bc"
        assert message.failures == [(None, "tool_not_allowed", "functions.get_weather:0", '{"city": "Bonn"}')]
        assert message.finish_reason == "stop"

    def test_an_empty_call(self) -> None:
        assert read(section(CALL + CALL_END)).failures == [(None, "incomplete", "", "")]


class TestNames:
    @pytest.mark.parametrize(
        ("said_id", "name"),
        [
            ("functions.get_weather:0", "get_weather"),
            (" functions.get_weather:12\n", "get_weather"),
            ("functions.fs.read-file:v2:3", "fs.read-file:v2"),
            ("functions.fs.read-file:v2", "fs.read-file:v2"),
            ("get_weather:0", "get_weather"),
            ("get_weather", "get_weather"),
            ("functions_get_weather_0", "get_weather"),
            ("functions_get_weather", "get_weather"),
            ("functions_fs_read-file_v2_4", "fs.read-file:v2"),
            ("functions.unheard_of:0", "unheard_of"),
            ("unheard_of:0", "unheard_of"),
            ("functions.functions.x:0", "functions.x"),
        ],
    )
    def test_the_name_is_taken_from_the_id(self, said_id: str, name: str) -> None:
        assert read(section(call(said_id, "{}"))).names == [name]

    @pytest.mark.parametrize(
        "said_id",
        ["3", "", "call00003", "call_0a1b2c", "call_AbCdEf123", "toolu_01XyZabc", "functions.3", ":0",
         "functions.:1", "chatcmpl-tool-5f3c9e", "123e4567-e89b-12d3-a456-426614174000"],
    )  # fmt: skip
    def test_an_id_without_a_name_means_the_tool_that_fits(self, said_id: str) -> None:
        message = read(section(call(said_id, '{"path": "a"}'), call(said_id, '{"city": "Bonn"}')))
        assert message.calls == [("fs.read-file:v2", '{"path": "a"}'), ("get_weather", '{"city": "Bonn"}')]
        assert message.ids == ["functions.fs.read-file:v2:0", "functions.get_weather:1"]
        only = read(section(call(said_id, '{"what": 1}')), form=make_form(tools=TOOLS[:1]))
        assert only.names == ["get_weather"]

    @pytest.mark.parametrize(
        ("arguments", "name"),
        [
            ('{"city": "a", "days": 1}', "get_weather"),
            ('{"city": 7}', None),
            ('{"city": "a", "days": true}', None),
            ('{"path": "a", "x": 1}', None),
            ('{"path": "a", "city": "b"}', "get_weather"),
            ("[]", None),
            ("{", None),
            ("", None),
        ],
    )
    def test_what_fits(self, arguments: str, name: str | None) -> None:
        message = read(section(call("0", arguments)))
        assert message.names == ([name] if name else [])

    def test_tools_that_only_differ_in_their_keys(self) -> None:
        tools: list[dict[str, Any]] = [
            {"type": "function", "function": {"name": name, "parameters": {"properties": {key: {}}}}}
            for name, key in (("a", "x"), ("b", "y"))
        ]
        form = make_form(tools=tools)
        assert read(section(call("0", '{"y": 1}')), form=form).names == ["b"]
        assert read(section(call("0", "{}")), form=form).names == []


class TestStopStrings:
    """One order: detokenise, hold back stop strings, read reasoning and calls (BR-59)."""

    def test_a_stop_string_ends_content_reasoning_and_arguments(self) -> None:
        assert read("a STOP b</think>c", stops=["STOP"]).reasoning == "a"
        assert read("a</think>b STOP c", stops=["STOP"]).content == "b "
        message = read(section(call("functions.get_weather:0", '{"city": "STOP"}')), stops=["STOP"])
        assert message.arguments == ['{"city": "']
        assert message.failures == [(0, "invalid_arguments", "", "")]

    def test_a_held_character_of_a_stop_string_is_not_lost(self) -> None:
        message = read("1 < 2</think>3 < 4", stops=["<|im_end|>"])
        assert (message.reasoning, message.content) == ("1 < 2", "3 < 4")

    def test_a_mark_can_be_a_stop_string(self) -> None:
        message = read("thought</think>answer", stops=["</think>"])
        assert (message.reasoning, message.content, message.finish_reason) == ("thought", "", "stop")

    def test_a_mark_that_is_cut_by_a_stop_string_is_not_shown(self) -> None:
        message = read(f"a</think>b{section(WEATHER)}", stops=["section"])
        assert (message.content, message.calls) == ("b", [])

    def test_a_stop_string_across_a_mark(self) -> None:
        message = read("a</think>b", stops=["nk>b"])
        assert (message.reasoning, message.content) == ("a", "")


class TestWithoutTokensForMarks:
    """A vocabulary without the marks: they are found in the text."""

    FORM = make_form(vocabulary={})

    def read_text(self, answer: str, form: Any = None) -> Any:
        return read_tokens(tiny_tokenizer().encode_text(answer), form=form or self.FORM, finish="length")

    def test_everything_is_found_in_the_text(self) -> None:
        message = self.read_text(f"hm </think>I look.{section(WEATHER, FILE)} bye")
        assert (message.reasoning, message.content) == ("hm", "I look. bye")
        assert message.calls == [("get_weather", '{"city": "Bonn"}'), ("fs.read-file:v2", '{"path": "a.py"}')]

    def test_what_only_begins_like_a_mark_is_text(self) -> None:
        assert self.read_text("a</think>1 < 2 <| 3 <|tool_call_x <|tool_call_").content == (
            "1 < 2 <| 3 <|tool_call_x <|tool_call_"
        )
