"""Thinking and tool calls through the whole house but the model: gateway, replica, ledger."""

from __future__ import annotations

from collections.abc import AsyncIterator, Awaitable, Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import msgspec
import pytest

from backend.config import BackendConfig, ModelSource
from backend.server import ReplicaServer
from tests.support.gateway_harness import MODEL, Harness
from tests.support.kimi_answers import END, TOOLS, call, section
from tests.support.kimi_text import spoken, write_kimi_text
from tests.support.scripted_replica import Script, ScriptedEngine

RUN = f"/run/{MODEL}"
CHAT = "/v1/chat/completions"
WEATHER = call("functions.get_weather:0", '{"city": "Köln"}')
REASONING = "Ich muss nachsehen."
ANSWER = f"{REASONING}</think>Moment.{section(WEATHER, WEATHER)}"


@pytest.fixture
async def engine() -> ScriptedEngine:
    engine = ScriptedEngine()
    engine.info = msgspec.structs.replace(engine.info, max_model_len=4096)
    return engine


@pytest.fixture
async def house(
    engine: ScriptedEngine, tmp_path: Path, start_gateway: Callable[..., Awaitable[Harness]]
) -> AsyncIterator[Harness]:
    directory = tmp_path / "kimi"
    directory.mkdir()
    write_kimi_text(directory)
    config = BackendConfig(
        replica_id="replica-0", model=ModelSource(path=str(directory), served_as=MODEL), port=0
    )

    async def start(_: BackendConfig, report: object) -> ScriptedEngine:
        return engine

    server = ReplicaServer(config, start=start)
    await server.listen()
    await server.load()
    replica = SimpleNamespace(id="replica-0", url=f"http://127.0.0.1:{server.port}")
    yield await start_gateway(replicas=[replica])
    await server.close()


def say(engine: ScriptedEngine, answer: str) -> None:
    engine.scripts.append(Script(spoken(answer + END)))


def joined(frames: list[Any]) -> dict[str, Any]:
    message: dict[str, Any] = {"content": "", "reasoning": "", "reasoning_content": "", "tool_calls": []}
    for frame in frames:
        for choice in frame.get("choices", ()) if isinstance(frame, dict) else ():
            delta = choice["delta"]
            for name in ("content", "reasoning", "reasoning_content"):
                message[name] += delta.get(name, "")
            for part in delta.get("tool_calls", ()):
                if "id" in part:
                    message["tool_calls"].append({name: part[name] for name in ("id", "type", "function")})
                else:
                    function = message["tool_calls"][part["index"]]["function"]
                    function["arguments"] += part["function"]["arguments"]
            message["finish_reason"] = choice["finish_reason"]
    return message


@pytest.mark.parametrize("path", [RUN, CHAT])
async def test_a_stream_and_a_whole_answer_say_the_same(
    house: Harness, engine: ScriptedEngine, path: str
) -> None:
    say(engine, ANSWER)
    whole = (await house.chat(path=path, tools=TOOLS, max_tokens=2000)).json
    choice = (whole["result"] if path == RUN else whole)["choices"][0]
    assert choice["finish_reason"] == "tool_calls"
    assert [each["id"] for each in choice["message"]["tool_calls"]] == [
        "functions.get_weather:0",
        "functions.get_weather:1",
    ]
    stream = await house.chat(path=path, tools=TOOLS, stream=True, max_tokens=2000)
    assert stream.frames[-1] == "[DONE]"
    message = joined(stream.frames)
    assert message.pop("finish_reason") == "tool_calls"
    assert message == {name: choice["message"][name] for name in message}
    assert message["reasoning"] == message["reasoning_content"] == REASONING
    records = await house.stopped_records()
    num_reasoning = len(spoken(f"{REASONING}</think>"))
    assert [record.reasoning_tokens for record in records] == [num_reasoning] * 2
    assert [record.completion_tokens for record in records] == [len(spoken(ANSWER + END))] * 2


async def test_an_agent_gets_through_three_turns(house: Harness, engine: ScriptedEngine) -> None:
    """Complaint B1, C5: replayed as it came, ids stay unique and every result finds its call."""
    messages: list[dict[str, Any]] = [{"role": "user", "content": "Wetter?"}]
    for _ in range(3):
        say(engine, ANSWER)
        reply = await house.chat(messages=messages, tools=TOOLS, tool_choice="auto", max_tokens=500)
        assert reply.status == 200, reply.body
        message = reply.json["choices"][0]["message"]
        messages.append(message)
        messages += [
            {"role": "tool", "tool_call_id": each["id"], "content": "18 °C"} for each in message["tool_calls"]
        ]
    say(engine, "</think>Schön.")
    reply = await house.chat(messages=messages, tools=TOOLS, max_tokens=500)
    assert reply.json["choices"][0]["message"]["content"] == "Schön."
    ids = [message["tool_call_id"] for message in messages if message["role"] == "tool"]
    assert ids == [f"functions.get_weather:{number}" for number in range(6)]


@pytest.mark.parametrize(
    "switch",
    [
        {"reasoning_effort": None},
        {"reasoning_effort": "none"},
        {"thinking": {"type": "disabled"}},
        {"chat_template_kwargs": {"thinking": False}},
        {"chat_template_kwargs": {"enable_thinking": False}},
    ],
)
async def test_thinking_is_off_in_every_spelling(
    house: Harness, engine: ScriptedEngine, switch: dict[str, Any]
) -> None:
    """Complaint C1."""
    say(engine, "Sofort.")
    reply = await house.chat(max_tokens=200, **switch)
    message = reply.json["choices"][0]["message"]
    assert message["content"] == "Sofort."
    assert "reasoning" not in message
    assert reply.json["usage"]["completion_tokens_details"] == {"reasoning_tokens": 0}
