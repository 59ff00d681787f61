"""The Responses form: input items as messages, chunks as events that OpenAI's own client understands."""

from __future__ import annotations

import json
from typing import Any

import pytest
from openai.types.responses import Response, ResponseStreamEvent
from pydantic import TypeAdapter

from gateway.errors import Refusal
from gateway.wire.responses import decode_responses

USAGE = json.dumps(
    {
        "prompt_tokens": 12,
        "completion_tokens": 7,
        "total_tokens": 19,
        "prompt_tokens_details": {"cached_tokens": 4},
        "completion_tokens_details": {"reasoning_tokens": 3},
        "neurons": 1.5,
    }
).encode()
EVENT: TypeAdapter[Any] = TypeAdapter(ResponseStreamEvent)
TOOL = {"type": "function", "name": "f", "parameters": {"type": "object"}, "strict": True}


def decode(**fields: Any) -> Any:
    return decode_responses(json.dumps({"model": "m", "input": "hi"} | fields).encode())


def messages_of(items: Any, **fields: Any) -> Any:
    return decode(input=items, **fields).messages


def test_a_string_is_the_users_and_instructions_come_first() -> None:
    assert messages_of("hi", instructions="be brief") == [
        {"role": "system", "content": "be brief"},
        {"role": "user", "content": "hi"},
    ]


def test_a_turn_of_an_agent_is_one_message_with_its_reasoning_and_calls() -> None:
    items = [
        {"role": "user", "content": [{"type": "input_text", "text": "weather?"}]},
        {
            "type": "reasoning",
            "id": "rs_1",
            "summary": [],
            "content": [{"type": "reasoning_text", "text": "hm"}],
        },
        {
            "type": "message",
            "role": "assistant",
            "id": "msg_1",
            "content": [{"type": "output_text", "text": "Let me look.", "annotations": []}],
        },
        {"type": "function_call", "call_id": "functions.f:0", "name": "f", "arguments": "{}"},
        {"type": "function_call", "call_id": "functions.g:1", "name": "g", "arguments": "{}"},
        {"type": "function_call_output", "call_id": "functions.f:0", "output": "rain"},
        {
            "type": "function_call_output",
            "call_id": "functions.g:1",
            "output": [{"type": "input_text", "text": "x"}],
        },
        {"type": "message", "role": "assistant", "content": "Rain."},
        {"type": "reasoning", "summary": [{"type": "summary_text", "text": "short"}]},
    ]
    user, turn, first, second, answer, thought = messages_of(items)
    assert user == {"role": "user", "content": [{"type": "text", "text": "weather?"}]}
    assert turn["reasoning_content"] == "hm"
    assert turn["content"] == [{"type": "text", "text": "Let me look."}]
    assert [call["id"] for call in turn["tool_calls"]] == ["functions.f:0", "functions.g:1"]
    assert turn["tool_calls"][1]["function"] == {"name": "g", "arguments": "{}"}
    assert first == {"role": "tool", "tool_call_id": "functions.f:0", "content": "rain"}
    assert second["content"] == [{"type": "text", "text": "x"}]
    assert answer == {"role": "assistant", "content": "Rain."}
    assert thought["reasoning_content"] == "short"


def test_parameters_become_those_of_a_chat() -> None:
    request = decode(
        max_output_tokens=9,
        temperature=0.5,
        top_p=0.9,
        stream=True,
        tools=[TOOL | {"description": "d"}],
        tool_choice={"type": "function", "name": "f"},
        parallel_tool_calls=False,
        reasoning={"effort": "low"},
        text={"format": {"type": "json_schema", "name": "n", "schema": {"type": "object"}, "strict": True}},
        top_logprobs=2,
        prompt_cache_key="k",
        include=["reasoning.encrypted_content"],
    )
    body = request.body
    assert (request.max_tokens, request.is_stream, request.prompt_cache_key) == (9, True, "k")
    assert (body.temperature, body.top_p, body.reasoning_effort) == (0.5, 0.9, "low")
    assert (body.logprobs, body.top_logprobs, body.parallel_tool_calls) == (True, 2, False)
    function = {"name": "f", "parameters": {"type": "object"}, "strict": True, "description": "d"}
    assert body.tools == [{"type": "function", "function": function}]
    assert body.tool_choice == {"type": "function", "function": {"name": "f"}}
    assert body.response_format.json_schema == {"name": "n", "schema": {"type": "object"}, "strict": True}


def test_images_pass_as_chats_have_them() -> None:
    part = {"type": "input_image", "image_url": "data:image/png;base64,AA==", "detail": "low"}
    (message,) = messages_of([{"role": "user", "content": [part]}])
    assert message["content"] == [
        {"type": "image_url", "image_url": {"url": "data:image/png;base64,AA==", "detail": "low"}}
    ]


@pytest.mark.parametrize(
    ("fields", "pointer"),
    [
        ({"input": None}, "/input"),
        ({"input": []}, "/input"),
        ({"model": None}, "/model"),
        ({"store": True}, "/store"),
        ({"background": True}, "/background"),
        ({"previous_response_id": "resp_1"}, "/previous_response_id"),
        ({"conversation": "c"}, "/conversation"),
        ({"prompt": {"id": "p"}}, "/prompt"),
        ({"truncation": "auto"}, "/truncation"),
        ({"max_tool_calls": 1}, "/max_tool_calls"),
        ({"include": ["file_search_call.results"]}, "/include/0"),
        ({"text": {"verbosity": "low"}}, "/text/verbosity"),
        ({"text": {"format": {"type": "json_schema", "name": "n"}}}, "/text/format/schema"),
        ({"tools": [{"type": "web_search"}]}, "/tools/0/type"),
        ({"tools": [{"type": "function", "name": ""}]}, "/tools/0/name"),
        ({"tools": [TOOL], "tool_choice": {"type": "function", "name": "g"}}, "/tool_choice/name"),
        ({"tools": [TOOL], "tool_choice": {"type": "mcp"}}, "/tool_choice/type"),
        ({"tool_choice": "any", "tools": [TOOL]}, "/tool_choice"),
        ({"max_output_tokens": 0}, "/max_output_tokens"),
        ({"temperature": 3}, "/temperature"),
        ({"input": [{"role": "x", "content": "a"}]}, "/input/0/role"),
        ({"instructions": "i", "input": [{"role": "user"}]}, "/input/0/content"),
        ({"input": [{"role": "user", "content": "a"}, {"type": "web_search_call"}]}, "/input/1/type"),
        ({"input": [{"type": "item_reference", "id": "i"}]}, "/input/0/type"),
        ({"input": [{"type": "function_call", "call_id": "c", "name": "n"}]}, "/input/0/arguments"),
        ({"input": [{"type": "function_call_output", "call_id": "c"}]}, "/input/0/output"),
        ({"input": [{"role": "user", "content": [{"type": "input_file"}]}]}, "/input/0/content/0/type"),
        ({"input": [{"role": "user", "content": [{"type": "input_text"}]}]}, "/input/0/content/0/text"),
    ],
)
def test_what_cannot_be_honoured_is_refused_by_its_own_name(fields: dict[str, Any], pointer: str) -> None:
    with pytest.raises(Refusal) as refused:
        decode(**fields)
    assert f"'{pointer}'" in refused.value.message


def chunk(delta: dict[str, Any], finish_reason: str | None = None, logprobs: Any = None) -> bytes:
    choice = {"index": 0, "delta": delta, "logprobs": logprobs, "finish_reason": finish_reason}
    body = {
        "id": "chatcmpl-r1",
        "object": "chat.completion.chunk",
        "created": 5,
        "model": "m",
        "choices": [choice],
    }
    return b"data: " + json.dumps(body).encode() + b"\n\n"


def called(index: int, call_id: str, function: dict[str, str]) -> bytes:
    call = {"index": index, "id": call_id, "type": "function", "function": function}
    return chunk({"tool_calls": [call]})


def events_of(raw: bytes) -> list[Any]:
    """Every event, checked against OpenAI's own types, in the order of their numbers."""
    events = []
    for frame in raw.decode().split("\n\n")[:-1]:
        name, data = frame.split("\n")
        event = json.loads(data.removeprefix("data: "))
        assert name == f"event: {event['type']}"
        assert event["sequence_number"] == len(events)
        EVENT.validate_python(event)
        events.append(event)
    return events


def stream(*chunks: bytes, **fields: Any) -> list[Any]:
    form = decode(stream=True, **fields).answer_form
    raw = b"".join(form.forward(each) for each in chunks)
    final = b'{"id":"chatcmpl-r1","object":"chat.completion.chunk","created":5,"model":"m","choices":[]}'
    return events_of(raw + form.stream_end(final, USAGE, includes_usage=False))


TURN = (
    chunk({"role": "assistant", "content": ""}),
    chunk({"reasoning_content": "h", "reasoning": "h"}),
    chunk({"reasoning_content": "m", "reasoning": "m"}),
    chunk({"content": "Let "}) + chunk({"content": "me."}),
    called(0, "functions.f:0", {"name": "f", "arguments": ""}),
    chunk({"tool_calls": [{"index": 0, "function": {"arguments": '{"a"'}}]}),
    chunk({"tool_calls": [{"index": 0, "function": {"arguments": ":1}"}}]}),
    called(1, "functions.g:1", {"name": "g", "arguments": "{}"}),
    chunk({}, "tool_calls"),
)  # fmt: skip


def test_a_stream_tells_of_every_item_and_ends_with_all_of_them() -> None:
    events = stream(*TURN, tools=[TOOL, TOOL | {"name": "g"}], metadata={"a": "b"})
    kinds = [event["type"].removeprefix("response.") for event in events]
    assert kinds == [
        "created", "in_progress",
        "output_item.added", "reasoning_text.delta", "reasoning_text.delta", "reasoning_text.done",
        "output_item.done",
        "output_item.added", "content_part.added", "output_text.delta", "output_text.delta",
        "output_text.done", "content_part.done", "output_item.done",
        "output_item.added", "function_call_arguments.delta", "function_call_arguments.delta",
        "function_call_arguments.done", "output_item.done",
        "output_item.added", "function_call_arguments.delta", "function_call_arguments.done",
        "output_item.done",
        "completed",
    ]  # fmt: skip
    response = events[-1]["response"]
    Response.model_validate(response)
    assert (response["id"], response["status"], response["created_at"]) == ("resp_r1", "completed", 5)
    reasoning, message, first, second = response["output"]
    assert reasoning["content"] == [{"type": "reasoning_text", "text": "hm"}]
    assert message["content"][0]["text"] == "Let me."
    assert (first["call_id"], first["name"], first["arguments"]) == ("functions.f:0", "f", '{"a":1}')
    assert (second["call_id"], second["arguments"], second["status"]) == ("functions.g:1", "{}", "completed")
    assert response["usage"] == {
        "input_tokens": 12,
        "input_tokens_details": {"cached_tokens": 4, "cache_write_tokens": 0},
        "output_tokens": 7,
        "output_tokens_details": {"reasoning_tokens": 3},
        "total_tokens": 19,
        "neurons": 1.5,
    }
    assert (response["metadata"], response["store"]) == ({"a": "b"}, False)


def test_one_piece_is_what_a_stream_ends_with() -> None:
    streamed = stream(*TURN)[-1]["response"]
    call = {"type": "function"}
    message = {
        "role": "assistant",
        "content": "Let me.",
        "reasoning_content": "hm",
        "reasoning": "hm",
        "tool_calls": [
            call | {"id": "functions.f:0", "function": {"name": "f", "arguments": '{"a":1}'}},
            call | {"id": "functions.g:1", "function": {"name": "g", "arguments": "{}"}},
        ],
    }
    completion = {
        "id": "chatcmpl-r1",
        "created": 5,
        "model": "m",
        "choices": [{"index": 0, "message": message, "finish_reason": "tool_calls", "logprobs": None}],
    }
    form = decode().answer_form
    whole = json.loads(form.completion(json.dumps(completion).encode(), USAGE))
    Response.model_validate(whole)
    assert whole == streamed


def test_a_cut_answer_is_incomplete() -> None:
    events = stream(chunk({"content": "Hel"}), chunk({}, "length"))
    assert events[-1]["type"] == "response.incomplete"
    response = events[-1]["response"]
    assert (response["status"], response["incomplete_details"]) == (
        "incomplete",
        {"reason": "max_output_tokens"},
    )
    assert response["output"][0]["status"] == "incomplete"


def test_an_answer_without_a_word_has_no_items() -> None:
    events = stream()
    assert [event["type"] for event in events] == [
        "response.created", "response.in_progress", "response.completed",
    ]  # fmt: skip
    assert events[-1]["response"]["output"] == []


def test_a_lost_stream_ends_in_a_failure() -> None:
    form = decode(stream=True).answer_form
    raw = form.forward(chunk({"content": "Hel"})) + form.failure("worker_lost", "The replica was lost.")
    *_, failed, error = events_of(raw)
    assert failed["type"] == "response.failed"
    assert failed["response"]["error"] == {"code": "server_error", "message": "The replica was lost."}
    assert (error["type"], error["code"]) == ("error", "worker_lost")


def test_logprobs_follow_their_text() -> None:
    entry = {"token": "Hi", "logprob": -0.5, "bytes": [72, 105], "top_logprobs": []}
    events = stream(
        chunk({"content": "Hi"}, logprobs={"content": [entry]}), chunk({}, "stop"), top_logprobs=1
    )
    delta = next(event for event in events if event["type"] == "response.output_text.delta")
    assert delta["logprobs"] == [entry]
    assert events[-1]["response"]["output"][0]["content"][0]["logprobs"] == [entry]
