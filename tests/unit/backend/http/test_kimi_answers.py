"""A replica of a model that thinks and calls tools: requests in, OpenAI-form answers out."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import msgspec
import pytest

from backend.config import ModelSource
from tests.support.kimi_answers import END, TOOLS, call, section
from tests.support.kimi_text import spoken, tiny_tokenizer, write_kimi_text
from tests.support.scripted_replica import Answer, Replica, Script, StartReplica

WEATHER = call("functions.get_weather:0", '{"city": "Köln"}')
FILE = call("functions.fs.read-file:v2:1", '{"path": "a.py"}')
ANSWER = f"Ich überlege.</think>Moment.{section(WEATHER, FILE)}"


@pytest.fixture
async def kimi(start_replica: StartReplica, tmp_path: Path) -> Replica:
    directory = tmp_path / "kimi"
    directory.mkdir()
    write_kimi_text(directory)
    replica = await start_replica(model=ModelSource(path=str(directory), served_as="@cf/test/model"))
    replica.engine.info = msgspec.structs.replace(replica.engine.info, max_model_len=8192)
    return replica


async def ask(replica: Replica, **fields: Any) -> Answer:
    return await replica.complete(max_tokens=2000, **fields)


def say(replica: Replica, answer: str, **script: Any) -> None:
    replica.engine.scripts.append(Script(spoken(answer + END), **script))


def joined(answer: Answer, index: int = 0) -> dict[str, Any]:
    """The message that a client puts together from a stream."""
    message: dict[str, Any] = {"role": None, "content": "", "reasoning": "", "tool_calls": [], "errors": []}
    for chunk in answer.chunks:
        for choice in chunk["choices"]:
            if choice["index"] != index:
                continue
            delta = choice["delta"]
            message["role"] = delta.get("role", message["role"])
            message["content"] += delta.get("content", "")
            message["reasoning"] += delta.get("reasoning", "")
            assert delta.get("reasoning") == delta.get("reasoning_content")
            message["errors"] += delta.get("tool_call_errors", [])
            for part in delta.get("tool_calls", []):
                if part["index"] == len(message["tool_calls"]):
                    assert set(part) == {"index", "id", "type", "function"}
                    assert part["type"] == "function"
                    assert part["function"]["name"]
                    message["tool_calls"].append({key: part[key] for key in ("id", "type", "function")})
                else:
                    assert set(part) == {"index", "function"}
                    assert set(part["function"]) == {"arguments"}
                    assert part["function"]["arguments"]
                    message["tool_calls"][part["index"]]["function"]["arguments"] += part["function"][
                        "arguments"
                    ]
            if choice["finish_reason"] is not None:
                message["finish_reason"] = choice["finish_reason"]
    return message


async def test_a_whole_answer_has_reasoning_content_and_calls(kimi: Replica) -> None:
    say(kimi, ANSWER)
    answer = (await ask(kimi, tools=TOOLS)).json
    assert answer["choices"] == [
        {
            "index": 0,
            "message": {
                "role": "assistant",
                "content": "Moment.",
                "reasoning_content": "Ich überlege.",
                "reasoning": "Ich überlege.",
                "tool_calls": [
                    {
                        "id": "functions.get_weather:0",
                        "type": "function",
                        "function": {"name": "get_weather", "arguments": '{"city": "Köln"}'},
                    },
                    {
                        "id": "functions.fs.read-file:v2:1",
                        "type": "function",
                        "function": {"name": "fs.read-file:v2", "arguments": '{"path": "a.py"}'},
                    },
                ],
                "refusal": None,
            },
            "logprobs": None,
            "finish_reason": "tool_calls",
        }
    ]
    usage = answer["usage"]
    assert usage["completion_tokens"] == len(spoken(ANSWER + END))
    assert usage["completion_tokens_details"] == {"reasoning_tokens": len(spoken("Ich überlege.</think>"))}
    assert (await kimi.usages())[0]["usage"] == usage
    assert (await kimi.usages())[0]["finish_reason"] == "tool_calls"


@pytest.mark.parametrize(
    "answer",
    [
        ANSWER,
        "nur gedacht",
        "a</think>삼겹살 👋🏽",
        f"x{section(call('functions.get_weather:0', '{'))} danach",
        f"</think>{section(WEATHER)}",
    ],
)
async def test_a_stream_says_the_same_as_a_whole_answer(kimi: Replica, answer: str) -> None:
    say(kimi, answer)
    whole = (await ask(kimi, tools=TOOLS)).json
    stream = await ask(kimi, tools=TOOLS, stream=True)
    message = joined(stream)
    expected = whole["choices"][0]["message"]
    assert message["content"] == (expected["content"] or "")
    assert message["reasoning"] == expected.get("reasoning", "")
    assert message["tool_calls"] == expected.get("tool_calls", [])
    assert message["errors"] == expected.get("tool_call_errors", [])
    assert message["finish_reason"] == whole["choices"][0]["finish_reason"]
    assert stream.chunks[-1]["usage"] == whole["usage"]


async def test_content_is_null_only_beside_calls(kimi: Replica) -> None:
    for answer, content in ((section(WEATHER), None), ("thought", ""), ("thought</think>", "")):
        kimi.engine.scripts.clear()
        kimi.engine.requests.clear()
        say(kimi, answer)
        assert (await ask(kimi, tools=TOOLS)).json["choices"][0]["message"]["content"] == content


async def test_arguments_stream_as_they_come(kimi: Replica) -> None:
    say(kimi, f"</think>{section(WEATHER)}")
    stream = await ask(kimi, tools=TOOLS, stream=True)
    deltas = [
        choice["delta"]["tool_calls"][0]
        for chunk in stream.chunks
        for choice in chunk["choices"]
        if "tool_calls" in choice["delta"]
    ]
    assert deltas[0] == {
        "index": 0,
        "id": "functions.get_weather:0",
        "type": "function",
        "function": {"name": "get_weather", "arguments": ""},
    }
    assert len(deltas) > 10
    assert all(delta["function"]["arguments"] for delta in deltas[1:])


async def test_arguments_that_are_no_json_are_declared(kimi: Replica) -> None:
    say(kimi, f"</think>{section(call('functions.get_weather:0', '{no'), call('9', '{}'))}")
    message = (await ask(kimi, tools=TOOLS)).json["choices"][0]["message"]
    assert message["tool_calls"][0]["function"]["arguments"] == "{no"
    first, second = message["tool_call_errors"]
    assert (first["index"], first["code"]) == (0, "invalid_arguments")
    assert {key: second[key] for key in ("index", "code", "id", "arguments")} == {
        "index": None, "code": "unknown_tool", "id": "9", "arguments": "{}",
    }  # fmt: skip


@pytest.mark.parametrize(
    "fields",
    [
        {"chat_template_kwargs": {"thinking": False}},
        {"chat_template_kwargs": {"enable_thinking": False}},
        {"reasoning_effort": "none"},
        {"thinking": {"type": "disabled"}},
    ],
)
@pytest.mark.parametrize("stream", [False, True])
async def test_thinking_can_be_switched_off(kimi: Replica, fields: dict[str, Any], stream: bool) -> None:
    """Complaint C1: no reasoning, and content that is not null."""
    say(kimi, "Sofort.")
    answer = await ask(kimi, stream=stream, **fields)
    message = joined(answer) if stream else answer.json["choices"][0]["message"]
    assert message["content"] == "Sofort."
    assert not message.get("reasoning")
    special = tiny_tokenizer().special_tokens
    assert kimi.engine.requests[0].prompt_token_ids[-2:] == [special["<think>"], special["</think>"]]


async def test_ids_stay_unique_over_the_turns_of_a_conversation(kimi: Replica) -> None:
    """Complaint B1: three turns, the same tool, a model that numbers each turn from 0."""
    messages: list[dict[str, Any]] = [{"role": "user", "content": "hi"}]
    ids = []
    for turn in range(3):
        say(kimi, f"</think>{section(WEATHER, WEATHER)}")
        message = (await ask(kimi, tools=TOOLS, messages=messages)).json["choices"][0]["message"]
        ids += [each["id"] for each in message["tool_calls"]]
        messages.append(message)
        messages += [
            {"role": "tool", "tool_call_id": each["id"], "content": "18"} for each in message["tool_calls"]
        ]
        assert len(kimi.engine.requests) == turn + 1
    assert ids == [f"functions.get_weather:{number}" for number in range(6)]
    prompt = b"".join(
        tiny_tokenizer().token_bytes[i] for i in kimi.engine.requests[-1].prompt_token_ids
    ).decode()
    assert [f"## Return of {each}\n" in prompt for each in ids] == [True] * 4 + [False] * 2


async def test_each_choice_has_its_own_parser(kimi: Replica) -> None:
    """BR-43: no state is shared between what runs at the same time."""
    say(kimi, f"a</think>{section(WEATHER)}", delay_s=0.001)
    say(kimi, f"b</think>{section(FILE)}", delay_s=0.001)
    say(kimi, "c</think>only text", delay_s=0.001)
    stream = await ask(kimi, tools=TOOLS, n=3, stream=True)
    messages = [joined(stream, index) for index in range(3)]
    assert [message["reasoning"] for message in messages] == ["a", "b", "c"]
    assert [message["finish_reason"] for message in messages] == ["tool_calls", "tool_calls", "stop"]
    assert [each["function"]["name"] for message in messages for each in message["tool_calls"]] == [
        "get_weather",
        "fs.read-file:v2",
    ]


async def test_without_parallel_calls_the_engine_is_stopped_at_the_second(kimi: Replica) -> None:
    say(kimi, f"</think>{section(WEATHER, FILE)} and so on", delay_s=0.001)
    answer = (await ask(kimi, tools=TOOLS, parallel_tool_calls=False)).json
    assert len(answer["choices"][0]["message"]["tool_calls"]) == 1
    assert answer["choices"][0]["finish_reason"] == "tool_calls"
    assert kimi.engine.aborted == [1]


async def test_choice_none_leaves_the_tools_out(kimi: Replica) -> None:
    say(kimi, f"</think>{section(WEATHER)}")
    answer = (await ask(kimi, tools=TOOLS, tool_choice="none")).json["choices"][0]
    assert "tool_calls" not in answer["message"]
    assert answer["finish_reason"] == "stop"
    assert answer["message"]["tool_call_errors"][0]["code"] == "tool_not_allowed"


async def test_log_probabilities_are_those_of_the_whole_answer(kimi: Replica) -> None:
    say(kimi, ANSWER)
    whole = (await ask(kimi, tools=TOOLS, logprobs=True)).json["choices"][0]["logprobs"]["content"]
    stream = await ask(kimi, tools=TOOLS, logprobs=True, stream=True)
    streamed = [
        entry
        for chunk in stream.chunks
        for choice in chunk["choices"]
        if choice["logprobs"]
        for entry in choice["logprobs"]["content"]
    ]
    assert streamed == whole
    assert bytes(byte for entry in whole for byte in entry["bytes"]) == ANSWER.encode()


async def test_both_end_tokens_stop_an_answer(kimi: Replica) -> None:
    say(kimi, "</think>x")
    await ask(kimi)
    await ask(kimi, ignore_eos=True)
    special = tiny_tokenizer().special_tokens
    assert kimi.engine.requests[0].sampling.stop_token_ids == (special["<|im_end|>"], special["[EOS]"])
    assert kimi.engine.requests[1].sampling.stop_token_ids == ()


async def test_images_are_refused_by_name(kimi: Replica) -> None:
    parts = [{"type": "text", "text": "see"}, {"type": "image_url", "image_url": {"url": "data:"}}]
    answer = await ask(kimi, messages=[{"role": "user", "content": parts}])
    assert answer.status == 400
    assert answer.json["error"]["param"] == "messages[0].content[1]"


async def test_a_model_without_marks_takes_no_tools(replica: Replica) -> None:
    replica.say("hi")
    answer = await ask(replica, tools=TOOLS)
    assert answer.status == 400
    assert answer.json["error"]["param"] == "tools"
    assert (await replica.complete(tools=TOOLS, tool_choice="none")).status == 200


async def test_numbers_that_no_float_holds_are_good_arguments(kimi: Replica) -> None:
    """JSON has them, so a grammar may make them; no decoder's limits may break a call."""
    said = '{"city":"\\ud800","days":1e999}'
    say(kimi, f"</think>{section(call('functions.get_weather:0', said))}")
    message = (await ask(kimi, tools=TOOLS)).json["choices"][0]["message"]
    assert "tool_call_errors" not in message
    assert message["tool_calls"][0]["function"]["arguments"] == said
