"""Faults that servers like this one were reported for, provoked at a replica; see docs/cases.md for all."""

from __future__ import annotations

import asyncio
import json
from pathlib import Path
from typing import Any

import msgspec
import pytest

from backend.config import ModelSource
from tests.support.kimi_answers import CALL, END, SECTION, TOOLS, call, section
from tests.support.kimi_text import spoken, write_kimi_text
from tests.support.scripted_replica import Answer, Replica, Script, StartReplica

FORCED = {"type": "function", "function": {"name": "get_weather"}}


@pytest.fixture
async def kimi(start_replica: StartReplica, tmp_path: Path) -> Replica:
    directory = tmp_path / "kimi"
    directory.mkdir()
    write_kimi_text(directory)
    replica = await start_replica(model=ModelSource(path=str(directory), served_as="@cf/test/model"))
    info = replica.engine.info
    replica.engine.info = msgspec.structs.replace(info, max_model_len=16384, max_running=32)
    return replica


def deltas(answer: Answer) -> list[dict[str, Any]]:
    return [choice["delta"] for chunk in answer.chunks for choice in chunk["choices"]]


@pytest.mark.slow
async def test_br_43_many_streams_with_long_arguments_lose_nothing(kimi: Replica) -> None:
    """24 at once, over 1 KiB of arguments each: no empty delta, no call lost, none mixed with another's."""
    cities = [f"{chr(97 + index) * 1100}" for index in range(24)]
    for city in cities:
        said = call("functions.get_weather:0", json.dumps({"city": city}))
        kimi.engine.scripts.append(Script(spoken(f"</think>{section(said)}{END}")))
    answers = await asyncio.gather(
        *(kimi.complete(max_tokens=9000, tools=TOOLS, stream=True) for _ in cities)
    )
    found = []
    for answer in answers:
        parts = [part for delta in deltas(answer) for part in delta.get("tool_calls", ())]
        assert all(part["function"].get("arguments") or part.get("id") for part in parts)
        arguments = "".join(part["function"]["arguments"] for part in parts)
        found.append(json.loads(arguments)["city"])
        (finish,) = [
            choice["finish_reason"]
            for chunk in answer.chunks
            for choice in chunk["choices"]
            if choice["finish_reason"]
        ]
        assert finish == "tool_calls"
    assert sorted(found) == cities


async def test_br_45_and_b3_the_first_delta_of_each_parallel_call_names_it_and_no_other_does(
    kimi: Replica,
) -> None:
    calls = section(
        call("functions.get_weather:0", '{"city":"a"}'), call("functions.get_weather:1", '{"city":"b"}')
    )
    kimi.engine.scripts.append(Script(spoken(f"</think>{calls}{END}")))
    answer = await kimi.complete(max_tokens=2000, tools=TOOLS, stream=True)
    parts = [part for delta in deltas(answer) for part in delta.get("tool_calls", ())]
    for index in (0, 1):
        first, *rest = [part for part in parts if part["index"] == index]
        assert first["id"] == f"functions.get_weather:{index}"
        assert (first["type"], first["function"]["name"]) == ("function", "get_weather")
        assert rest
        for part in rest:
            assert set(part) == {"index", "function"}
            assert part["function"]["arguments"], "no closing delta of nothing"
    assert [part["index"] for part in parts] == sorted(part["index"] for part in parts)


@pytest.mark.parametrize("choice", ["required", FORCED])
@pytest.mark.parametrize("stream", [False, True])
async def test_b4_a_forced_call_is_a_call_and_no_text(kimi: Replica, choice: Any, stream: bool) -> None:
    said = section(call("functions.get_weather:0", '{"city":"Oslo"}'))
    kimi.engine.scripts.append(Script(spoken(f"</think>{said}{END}")))
    answer = await kimi.complete(max_tokens=2000, tools=TOOLS, tool_choice=choice, stream=stream)
    assert answer.status == 200
    assert SECTION not in answer.body.decode()
    assert CALL not in answer.body.decode()
    assert b'"finish_reason":"tool_calls"' in answer.body
    if not stream:
        assert answer.json["choices"][0]["message"]["content"] is None
    (request,) = kimi.engine.requests
    assert request.sampling.grammar, "the mask leaves the model no other way"


@pytest.mark.parametrize("said", ["6", "true", "null", "-0.5", "[1]", "{}"])
@pytest.mark.parametrize("stream", [False, True])
async def test_d3_content_is_a_string_whatever_it_looks_like(kimi: Replica, said: str, stream: bool) -> None:
    kimi.engine.scripts.append(Script(spoken(f"</think>{said}{END}")))
    answer = await kimi.complete(max_tokens=200, stream=stream)
    if stream:
        contents = [delta["content"] for delta in deltas(answer) if "content" in delta]
        assert "".join(contents) == said
    else:
        assert answer.json["choices"][0]["message"]["content"] == said
