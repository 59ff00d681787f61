"""What of a client's request reaches the replica, and in which form."""

from __future__ import annotations

from typing import Any

import pytest

from tests.support.fake_replica import FakeReplica
from tests.support.gateway_harness import (
    MODEL,
    OTHER_ACCOUNT,
    OTHER_TOKEN,
    Harness,
)

RUN = f"/run/{MODEL}"


def received(replicas: list[FakeReplica]) -> dict[str, Any]:
    """The one request that came since the last look."""
    (request,) = [request for replica in replicas for request in replica.requests]
    for replica in replicas:
        replica.requests.clear()
    return request


async def test_sampling_parameters_arrive(gateway: Harness, replicas: list[FakeReplica]) -> None:
    await gateway.chat(
        max_tokens=7,
        temperature=0,
        top_p=0.5,
        top_k=3,
        min_p=0.1,
        seed=-4,
        frequency_penalty=0.25,
        presence_penalty=-0.5,
        repetition_penalty=1.2,
        logit_bias={"5": -100},
        logprobs=True,
        top_logprobs=3,
        n=2,
        stop="END",
    )
    request = received(replicas)
    expected = {
        "model": MODEL,
        "max_tokens": 7,
        "temperature": 0.0,
        "top_p": 0.5,
        "top_k": 3,
        "min_p": 0.1,
        "seed": -4,
        "frequency_penalty": 0.25,
        "presence_penalty": -0.5,
        "repetition_penalty": 1.2,
        "logit_bias": {"5": -100.0},
        "logprobs": True,
        "top_logprobs": 3,
        "n": 2,
        "stop": ["END"],
    }
    assert {name: request.get(name) for name in expected} == expected


async def test_max_completion_tokens_wins_and_the_model_has_a_default(
    gateway: Harness, replicas: list[FakeReplica]
) -> None:
    await gateway.chat(max_completion_tokens=5, max_tokens=9)
    assert received(replicas)["max_tokens"] == 5
    await gateway.chat(max_tokens=9)
    assert received(replicas)["max_tokens"] == 9
    await gateway.chat()
    request = received(replicas)
    assert "max_tokens" not in request
    assert request["default_max_tokens"] == 256


async def test_contents_of_any_form_arrive_as_they_are(gateway: Harness, replicas: list[FakeReplica]) -> None:
    """Complaint F1: arrays and strings mixed; null beside tool calls; replayed reasoning; all roles."""
    messages = [
        {"role": "developer", "content": "be brief"},
        {"role": "system", "content": [{"type": "text", "text": "a"}, {"type": "text", "text": "b"}]},
        {"role": "user", "content": "hi", "name": "ann"},
        {
            "role": "assistant",
            "content": None,
            "reasoning_content": "hm",
            "tool_calls": [
                {"id": "functions.f:0", "type": "function", "function": {"name": "f", "arguments": "{}"}}
            ],
        },
        {"role": "tool", "tool_call_id": "functions.f:0", "content": [{"type": "text", "text": "42"}]},
        {"role": "assistant", "content": "", "tool_calls": []},
        {"role": "user", "content": [{"type": "text", "text": "\u00e9\U0001f44b"}]},
    ]
    for path in ("/v1/chat/completions", RUN):
        reply = await gateway.chat(path=path, messages=messages)
        assert reply.status == 200, reply.body
        assert received(replicas)["messages"] == messages


async def test_tools_with_choice_none_are_honoured_by_leaving_them_out(
    gateway: Harness, replicas: list[FakeReplica]
) -> None:
    tool = {"type": "function", "function": {"name": "f"}}
    reply = await gateway.chat(tools=[tool], tool_choice="none")
    assert reply.status == 200
    assert "tools" not in received(replicas)


@pytest.mark.parametrize(
    "wanted",
    [
        {"type": "json_object"},
        {"type": "json_schema", "json_schema": {"type": "object", "title": "bare"}},
        {"type": "json_schema", "json_schema": {"name": "n", "schema": {"type": "object"}, "strict": True}},
    ],
)
@pytest.mark.parametrize("stream", [False, True])
async def test_the_form_of_an_answer_reaches_the_replica(
    gateway: Harness, replicas: list[FakeReplica], wanted: dict[str, Any], stream: bool
) -> None:
    """Complaint D1: streaming too."""
    for path in ("/v1/chat/completions", RUN):
        reply = await gateway.chat(path=path, response_format=wanted, stream=stream)
        assert reply.status == 200, reply.body
        assert received(replicas)["response_format"] == wanted


async def test_tools_that_may_be_called_reach_the_replica(
    gateway: Harness, replicas: list[FakeReplica]
) -> None:
    tool = {
        "type": "function",
        "function": {"name": "f", "description": "Does it.", "parameters": {"type": "object"}},
    }
    for choice in (None, "auto", "required", {"type": "function", "function": {"name": "f"}}):
        reply = await gateway.chat(tools=[tool], tool_choice=choice, parallel_tool_calls=False)
        assert reply.status == 200, reply.body
        request = received(replicas)
        assert request["tools"] == [tool]
        assert request.get("tool_choice") == choice
        assert request["parallel_tool_calls"] is False


@pytest.mark.parametrize(
    ("sent", "arrives"),
    [
        ({}, {}),
        ({"reasoning_effort": "low"}, {"reasoning_effort": "low"}),
        ({"reasoning_effort": "none"}, {"reasoning_effort": "none"}),
        ({"reasoning_effort": None}, {"reasoning_effort": "none"}),
        ({"thinking": {"type": "disabled"}}, {"thinking": {"type": "disabled"}}),
        (
            {"chat_template_kwargs": {"enable_thinking": False}},
            {"chat_template_kwargs": {"enable_thinking": False}},
        ),
    ],
)
async def test_ways_to_switch_thinking_off_reach_the_replica(
    gateway: Harness, replicas: list[FakeReplica], sent: dict[str, Any], arrives: dict[str, Any]
) -> None:
    """Complaint C1: null means no reasoning, and nothing else is lost on the way."""
    assert (await gateway.chat(**sent)).status == 200
    request = received(replicas)
    names = ("reasoning_effort", "thinking", "chat_template_kwargs")
    assert {name: request[name] for name in names if name in request} == arrives


async def test_the_cache_salt_is_the_accounts_alone(gateway: Harness, replicas: list[FakeReplica]) -> None:
    """BR-97, BR-101: the same account reuses its prefixes in every request, another never sees them."""
    await gateway.chat()
    mine = received(replicas)["cache_salt"]
    await gateway.chat(path=RUN, stream=True, headers={"x-session-affinity": "s"})
    assert received(replicas)["cache_salt"] == mine
    theirs = await gateway.post(
        gateway.root(f"/client/v4/accounts/{OTHER_ACCOUNT}/ai/v1/chat/completions"),
        {"model": MODEL, "messages": [{"role": "user", "content": "Say hello."}]},
        token=OTHER_TOKEN,
    )
    assert theirs.status == 200
    salt = received(replicas)["cache_salt"]
    assert len(salt) == len(mine) == 64
    assert salt != mine


async def test_the_salt_survives_a_restart(gateway: Harness, replicas: list[FakeReplica]) -> None:
    await gateway.chat()
    before = received(replicas)["cache_salt"]
    await gateway.stop()
    await gateway.start()
    await gateway.chat()
    assert received(replicas)["cache_salt"] == before


async def test_the_clients_trace_reaches_the_replica(gateway: Harness, replicas: list[FakeReplica]) -> None:
    traceparent = "00-0af7651916cd43dd8448eb211c80319c-b7ad6b7169203331-01"
    await gateway.chat(headers={"traceparent": traceparent, "tracestate": "a=b"})
    (headers,) = replicas[0].headers + replicas[1].headers
    assert (headers["traceparent"], headers["tracestate"]) == (traceparent, "a=b")


def allowed(mode: str, *names: str) -> dict[str, Any]:
    tools = [{"type": "function", "function": {"name": name}} for name in names]
    return {"type": "allowed_tools", "allowed_tools": {"mode": mode, "tools": tools}}


@pytest.mark.parametrize("mode", ["auto", "required"])
async def test_only_allowed_tools_reach_the_replica(
    gateway: Harness, replicas: list[FakeReplica], mode: str
) -> None:
    tools = [{"type": "function", "function": {"name": name}} for name in ("f", "g", "h")]
    reply = await gateway.chat(tools=tools, tool_choice=allowed(mode, "h", "f"))
    assert reply.status == 200, reply.body
    request = received(replicas)
    assert [tool["function"]["name"] for tool in request["tools"]] == ["f", "h"]
    assert request["tool_choice"] == mode


@pytest.mark.parametrize(
    ("choice", "pointer"),
    [
        ({"type": "allowed_tools"}, "/tool_choice/allowed_tools"),
        (allowed("all", "f"), "/tool_choice/allowed_tools/mode"),
        (allowed("auto"), "/tool_choice/allowed_tools/tools"),
        (allowed("auto", "f", "x"), "/tool_choice/allowed_tools/tools/1"),
    ],
)
async def test_what_is_wrong_with_allowed_tools_is_named(
    gateway: Harness, choice: dict[str, Any], pointer: str
) -> None:
    tools = [{"type": "function", "function": {"name": "f"}}]
    reply = await gateway.chat(tools=tools, tool_choice=choice)
    assert reply.status == 400
    assert f"'{pointer}'" in reply.json["errors"][0]["message"]


async def test_what_needs_no_doing_is_accepted(gateway: Harness, replicas: list[FakeReplica]) -> None:
    """Parameters of OpenAI's that only mean something to OpenAI, or are hints."""
    reply = await gateway.chat(
        metadata={"a": "b"},
        user="u",
        store=True,
        service_tier="auto",
        safety_identifier="s",
        prediction={"type": "content", "content": "x"},
        prompt_cache_retention="24h",
        verbosity="medium",
        modalities=["text"],
        stream_options=None,
    )
    assert reply.status == 200, reply.body
