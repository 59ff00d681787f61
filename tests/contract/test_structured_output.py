"""JSON answers and forced tool calls through the whole house, with a random model that says anything."""

from __future__ import annotations

import json
from collections.abc import AsyncIterator, Awaitable, Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import jsonschema
import pytest

from backend.config import BackendConfig, CacheConfig, DeviceConfig, ModelSource, SchedulerConfig
from backend.server import ReplicaServer
from tests.support.gateway_harness import MODEL, Harness
from tests.support.grammar_walks import tiny_text
from tests.support.kimi_answers import TOOLS
from tests.support.kimi_text import write_kimi_text
from tests.support.tiny_models import write_tiny_kimi

pytestmark = pytest.mark.slow

RUN = f"/run/{MODEL}"
CHAT = "/v1/chat/completions"
SCHEMA: dict[str, Any] = {
    "type": "object",
    "properties": {
        "name": {"type": "string", "maxLength": 12},
        "sizes": {"type": "array", "items": {"type": "integer", "minimum": 0, "maximum": 99}, "maxItems": 3},
        "kind": {"enum": ["a", "bb", None]},
    },
    "required": ["name", "sizes", "kind"],
    "additionalProperties": False,
}
INSTANT = {"reasoning_effort": "none", "temperature": 1.0, "max_tokens": 160}
SCHEMAS = {
    "bare": {"type": "json_schema", "json_schema": SCHEMA},
    "wrapped": {"type": "json_schema", "json_schema": {"name": "n", "schema": SCHEMA, "strict": True}},
}


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    directory = tmp_path_factory.mktemp("kimi")
    stops = tiny_text().stop_token_ids
    write_tiny_kimi(directory, vocab_size=len(tiny_text().token_bytes), eos_token_id=stops[0])
    write_kimi_text(directory)
    return directory


@pytest.fixture
async def house(checkpoint: Path, start_gateway: Callable[..., Awaitable[Harness]]) -> AsyncIterator[Harness]:
    config = BackendConfig(
        replica_id="replica-0",
        model=ModelSource(path=str(checkpoint), served_as=MODEL, max_model_len=1024),
        port=0,
        cache=CacheConfig(num_blocks=512),
        scheduler=SchedulerConfig(max_running=8),
        device=DeviceConfig(device="cpu", dtype="float32", threads=1, weights="float32"),
    )
    server = ReplicaServer(config)
    await server.listen()
    await server.load()
    replica = SimpleNamespace(id="replica-0", url=f"http://127.0.0.1:{server.port}")
    yield await start_gateway(replicas=[replica])
    await server.close()


def choice_of(reply: Any, path: str) -> Any:
    assert reply.status == 200, reply.body
    return (reply.json["result"] if path == RUN else reply.json)["choices"][0]


async def test_completed_answers_meet_their_schema_streaming_and_not(house: Harness) -> None:
    """Complaint D1."""
    num_stopped = 0
    for seed, (path, wanted) in enumerate(
        (path, wanted) for path in (RUN, CHAT) for wanted in SCHEMAS.values()
    ):
        fields = {**INSTANT, "seed": seed, "response_format": wanted}
        choice = choice_of(await house.chat(path=path, **fields), path)
        stream = await house.chat(path=path, stream=True, **fields)
        assert stream.frames[-1] == "[DONE]"
        assert stream.text == choice["message"]["content"]
        if choice["finish_reason"] == "stop":
            num_stopped += 1
            jsonschema.validate(json.loads(choice["message"]["content"]), SCHEMA)
    assert num_stopped >= 2


async def test_calls_are_forced(house: Harness) -> None:
    schemas = {tool["function"]["name"]: tool["function"]["parameters"] for tool in TOOLS}
    for seed in range(2):
        named = {"type": "function", "function": {"name": "fs.read-file:v2"}}
        for choice in ("required", named):
            reply = await house.chat(
                tools=TOOLS, tool_choice=choice, parallel_tool_calls=False, seed=seed, **INSTANT
            )
            answer = choice_of(reply, CHAT)
            message = answer["message"]
            calls = message["tool_calls"]
            assert message["content"] is None
            assert answer["finish_reason"] == "tool_calls"
            assert len(calls) == 1
            if choice == named:
                assert calls[0]["function"]["name"] == "fs.read-file:v2"
            if "tool_call_errors" not in message:
                function = calls[0]["function"]
                jsonschema.validate(json.loads(function["arguments"]), schemas[function["name"]])


@pytest.mark.parametrize("stream", [False, True])
async def test_an_impossible_schema_is_refused_with_its_place(house: Harness, stream: bool) -> None:
    """BR-48, and a refusal has its true status in a stream too."""
    endless = {"$ref": "#/$defs/n", "$defs": {"n": {"$ref": "#/$defs/n"}}}
    for schema, place in ((endless, "$ref"), ({"properties": {"a": {"not": {}}}}, "properties/a/not")):
        wanted = {"type": "json_schema", "json_schema": {"name": "n", "schema": schema}}
        reply = await house.chat(stream=stream, response_format=wanted, **INSTANT)
        assert reply.status == 400
        message = reply.json["errors"][0]["message"]
        assert f"'/response_format/json_schema/schema/{place}'" in message


async def test_json_objects_and_strict_tools_beside_each_other(house: Harness) -> None:
    strict = [{"type": "function", "function": {**tool["function"], "strict": True}} for tool in TOOLS]
    for seed in range(2):
        reply = await house.chat(tools=strict, response_format={"type": "json_object"}, seed=seed, **INSTANT)
        answer = choice_of(reply, CHAT)
        if answer["finish_reason"] == "stop":
            assert isinstance(json.loads(answer["message"]["content"]), dict)
        elif answer["finish_reason"] == "tool_calls":
            assert answer["message"]["tool_calls"]
    await house.stopped_records()
