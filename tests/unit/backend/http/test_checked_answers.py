"""Whole answers that must meet a schema are looked at once more before they count as good.

The engine here says what a grammar would never let out: what matters is what becomes of it.
"""

from __future__ import annotations

import json
import logging
from pathlib import Path
from typing import Any

import msgspec
import pytest

from backend.config import GrammarConfig, ModelSource
from tests.support.kimi_answers import END, call, section
from tests.support.kimi_text import spoken, write_kimi_text
from tests.support.scripted_replica import Replica, Script, StartReplica

SCHEMA = {"type": "object", "properties": {"secret": {"type": "integer"}}, "required": ["secret"]}
FORMAT = {"type": "json_schema", "json_schema": {"name": "n", "schema": SCHEMA}}
STRICT = {"type": "function", "function": {"name": "f", "parameters": SCHEMA, "strict": True}}
LOOSE = {"type": "function", "function": {"name": "g", "parameters": SCHEMA}}


@pytest.fixture
async def kimi(start_replica: StartReplica, tmp_path: Path) -> Replica:
    directory = tmp_path / "kimi"
    directory.mkdir()
    write_kimi_text(directory)
    replica = await start_replica(
        model=ModelSource(path=str(directory), served_as="@cf/test/model"),
        grammar=GrammarConfig(max_check_steps=100),
    )
    replica.engine.info = msgspec.structs.replace(replica.engine.info, max_model_len=8192)
    return replica


async def ask(replica: Replica, said: str, **fields: Any) -> dict[str, Any]:
    """The one choice of a whole answer."""
    replica.engine.scripts[:] = [Script(spoken(f"</think>{said}{END}"))]
    answer = await replica.complete(max_tokens=2000, **fields)
    assert answer.status == 200
    choice: dict[str, Any] = answer.json["choices"][0]
    return choice


async def checked(replica: Replica, verdict: str) -> float:
    answer = await replica.call("GET", "/metrics")
    name = f'embergate_answers_checked_total{{model_name="@cf/test/model",verdict="{verdict}"}} '
    lines = [line for line in answer.body.decode().splitlines() if line.startswith(name)]
    return float(lines[0].rpartition(" ")[2]) if lines else 0.0


async def test_an_answer_that_meets_its_schema_is_good(kimi: Replica) -> None:
    choice = await ask(kimi, '{"secret":7}', response_format=FORMAT)
    assert choice["finish_reason"] == "stop"
    assert "response_format_error" not in choice["message"]
    assert await checked(kimi, "met") == 1


@pytest.mark.parametrize(
    ("said", "what"),
    [
        ('{"secret":"swordfish"}', "'type' of the schema is not met at $.secret"),
        ("{}", "'required' of the schema is not met at $"),
        ('{"secret":7', "the answer is no JSON"),
    ],
)
async def test_one_that_does_not_says_so_and_is_counted(
    kimi: Replica, said: str, what: str, caplog: pytest.LogCaptureFixture
) -> None:
    with caplog.at_level(logging.ERROR, "backend.request"):
        choice = await ask(kimi, said, response_format=FORMAT)
    assert choice["finish_reason"] == "error"
    assert choice["message"]["content"] == said
    assert choice["message"]["response_format_error"] == {"code": "schema_not_met", "message": what}
    assert await checked(kimi, "broken") == 1
    (record,) = caplog.records
    assert "swordfish" not in json.dumps(record.__dict__, default=str)


async def test_what_was_cut_is_no_broken_answer(kimi: Replica) -> None:
    kimi.engine.scripts[:] = [Script(spoken('</think>{"sec'), finish="length")]
    answer = await kimi.complete(max_tokens=2000, response_format=FORMAT)
    assert answer.json["choices"][0]["finish_reason"] == "length"
    cut = await ask(kimi, '{"secret":7}', response_format=FORMAT, stop=["7"])
    assert (cut["finish_reason"], cut["message"]["content"]) == ("stop", '{"secret":')
    assert await checked(kimi, "broken") == 0


async def test_a_stop_string_excuses_nothing_that_is_whole(kimi: Replica) -> None:
    choice = await ask(kimi, '{"secret":true}', response_format=FORMAT, stop=["7"])
    assert choice["finish_reason"] == "error"


async def test_arguments_of_strict_tools_are_looked_at_and_those_of_others_are_not(kimi: Replica) -> None:
    calls = section(
        call("functions.f:0", '{"secret":7}'),
        call("functions.f:1", '{"secret":null}'),
        call("functions.g:2", '{"secret":null}'),
    )
    choice = await ask(kimi, calls, tools=[STRICT, LOOSE])
    assert choice["finish_reason"] == "error"
    assert choice["message"]["tool_call_errors"] == [
        {"index": 1, "code": "schema_not_met", "message": "'type' of the schema is not met at $.secret"}
    ]
    assert (await checked(kimi, "met"), await checked(kimi, "broken")) == (1, 1)


async def test_each_choice_is_judged_for_itself(kimi: Replica) -> None:
    kimi.engine.scripts[:] = [
        Script(spoken(f'</think>{{"secret":{value}}}{END}')) for value in ("1", "null", "2")
    ]
    answer = await kimi.complete(max_tokens=2000, response_format=FORMAT, n=3)
    assert [choice["finish_reason"] for choice in answer.json["choices"]] == ["stop", "error", "stop"]


async def test_what_takes_too_long_is_not_judged(kimi: Replica) -> None:
    schema = {"type": "array", "items": {"anyOf": [{"type": "object"}, {"type": "null"}]}}
    form = {"type": "json_schema", "json_schema": schema}
    choice = await ask(kimi, f"[{'{},' * 200}1]", response_format=form)
    assert (choice["finish_reason"], await checked(kimi, "unjudged")) == ("stop", 1)
    choice = await ask(kimi, "[{},1]", response_format=form)
    assert (choice["finish_reason"], await checked(kimi, "broken")) == ("error", 1)
