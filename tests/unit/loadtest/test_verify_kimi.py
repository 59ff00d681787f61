"""The scorecard judges: good is good, every fault is seen, and random weights excuse decisions only."""

from __future__ import annotations

import base64
import json
from collections import Counter
from collections.abc import AsyncIterator, Callable
from io import BytesIO
from pathlib import Path
from typing import Any

import aiohttp
import pytest
import yaml
from aiohttp import web
from PIL import Image

from embergate.config_file import decode_config
from loadtest.verify_kimi.__main__ import ask_all, spread
from loadtest.verify_kimi.asking import Endpoint, Reply, StreamReader
from loadtest.verify_kimi.cases import (
    OWN_SCHEMAS,
    TOOLS,
    as_arguments,
    load_schemas,
    load_trigger_cases,
    own_trigger_cases,
)
from loadtest.verify_kimi.own_server import _changed
from loadtest.verify_kimi.probes import (
    ANSWERED,
    FINISH,
    IMAGES,
    JSON_ANSWERS,
    REFUSALS,
    SCHEMA_AUTO,
    SCHEMA_FORCED,
    STREAM,
    TRIGGERS,
    TWIN,
    Bars,
    build_probes,
    judge_call,
    png_url,
    row_kinds,
    schema_problem,
)
from loadtest.verify_kimi.scorecard import BAD, GOOD, Mark, RowKind, Scorecard, trigger_score
from tests.support.shared_data import shared_data

ROOT = Path(__file__).parents[3]
ON = OWN_SCHEMAS[0]
Fault = Callable[[dict[str, Any], dict[str, Any]], None]


def answer_of(body: dict[str, Any]) -> dict[str, Any]:
    """What a perfect model answers: it knows the labels of our own cases by heart."""
    wanted = {case.messages[0]["content"] for case in own_trigger_cases() if case.calls}
    asked, choice = body["messages"][-1]["content"], body.get("tool_choice", "auto")
    message: dict[str, Any] = {"role": "assistant", "content": "Certainly.", "tool_calls": []}
    if isinstance(choice, dict):
        message |= {"content": None, "tool_calls": [a_call("submit", {"on": True})]}
    elif str(asked) in wanted and choice != "none":
        message |= {"content": None, "tool_calls": [a_call("get_weather", {"city": "Oslo"})]}
    elif body.get("response_format", {}).get("type") == "json_schema":
        message["content"] = '{"on": false}'
    finish = "tool_calls" if message["tool_calls"] else "stop"
    num_images = sum(part["type"] == "image_url" for part in asked) if isinstance(asked, list) else 0
    return {
        "choices": [{"index": 0, "message": message, "finish_reason": finish}],
        "usage": {"prompt_tokens": 9 + 69 * num_images, "completion_tokens": 3, "total_tokens": 12},
    }


def a_call(name: str, arguments: dict[str, Any]) -> dict[str, Any]:
    function = {"name": name, "arguments": json.dumps(arguments)}
    return {"id": f"functions.{name}:0", "type": "function", "function": function}


def frames_of(answer: dict[str, Any]) -> list[dict[str, Any]]:
    """An answer as the chunks of a stream."""
    choice = answer["choices"][0]
    deltas: list[dict[str, Any]] = [{"role": "assistant", "content": ""}]
    if choice["message"]["content"]:
        deltas += [{"content": piece} for piece in choice["message"]["content"]]
    for index, call in enumerate(choice["message"]["tool_calls"]):
        begun = {**call, "index": index, "function": {"name": call["function"]["name"], "arguments": ""}}
        rest = {"index": index, "function": {"arguments": call["function"]["arguments"]}}
        deltas += [{"tool_calls": [begun]}, {"tool_calls": [rest]}]
    frames = [{"choices": [{"index": 0, "delta": delta, "finish_reason": None}]} for delta in deltas]
    frames.append({"choices": [{"index": 0, "delta": {}, "finish_reason": choice["finish_reason"]}]})
    return [*frames, {"choices": [], "usage": answer["usage"]}]


def is_wrong(body: dict[str, Any]) -> bool:
    """What a good server refuses."""
    choice, tools = body.get("tool_choice"), body.get("tools")
    form = body.get("response_format", {})
    return (
        (choice == "required" and not tools)
        or choice == "bogus"
        or (isinstance(choice, dict) and choice["function"]["name"] == "other")
        or form.get("type") == "xml"
        or (form.get("type") == "json_schema" and not isinstance(form["json_schema"], dict))
        or body.get("temperature") == "hot"
    )


class Server:
    """A server that is perfect but for one fault."""

    def __init__(self) -> None:
        self.fault: Fault = lambda body, answer: None
        self.num_streams = 0

    async def chat(self, request: web.Request) -> web.Response:
        body = await request.json()
        if is_wrong(body):
            return web.json_response({"errors": [{"message": "this field is wrong"}]}, status=400)
        answer = answer_of(body)
        self.fault(body, answer)
        if not body.get("stream"):
            return web.json_response(answer)
        text = "".join(f"data: {json.dumps(frame)}\n\n" for frame in frames_of(answer))
        return web.Response(text=f"{text}data: [DONE]\n\n", content_type="text/event-stream")


@pytest.fixture
async def server() -> AsyncIterator[tuple[Server, str]]:
    server = Server()
    app = web.Application()
    app.router.add_post("/v1/chat/completions", server.chat)
    runner = web.AppRunner(app, access_log=None)
    await runner.setup()
    await web.TCPSite(runner, "127.0.0.1", 0).start()
    yield server, f"http://127.0.0.1:{runner.addresses[0][1]}/v1"
    await runner.cleanup()


async def card_of(url: str, *, random_weights: bool = False) -> Scorecard:
    card = Scorecard(row_kinds(Bars(), has_random_weights=random_weights), has_random_weights=random_weights)
    probes = build_probes(own_trigger_cases(), [("on", ON)], 64)
    done: list[None] = []
    async with aiohttp.ClientSession() as session:
        await ask_all(Endpoint(session, url, "m", 10), probes, card, 4, lambda: done.append(None))
    assert len(done) == len(probes)
    return card


def verdicts(card: Scorecard) -> dict[str, str]:
    return {row.kind.name: row.verdict for row in card.rows()}


async def test_a_perfect_server_passes_every_row(server: tuple[Server, str]) -> None:
    card = await card_of(server[1])
    assert set(verdicts(card).values()) == {"pass"}
    assert card.is_passed
    assert [row.value for row in card.rows()] == [1.0] * len(card.rows())
    assert [len(card.table(is_wide=is_wide).columns) for is_wide in (False, True)] == [5, 6]


def calls_nothing(body: dict[str, Any], answer: dict[str, Any]) -> None:
    if "tools" in body and body.get("tool_choice") in ("auto", None):
        answer["choices"][0] |= {"message": {"content": "no", "tool_calls": []}, "finish_reason": "stop"}


def wrong_arguments(body: dict[str, Any], answer: dict[str, Any]) -> None:
    for call in answer["choices"][0]["message"]["tool_calls"]:
        call["function"]["arguments"] = '{"on": "yes"}'


def unknown_tool(body: dict[str, Any], answer: dict[str, Any]) -> None:
    for call in answer["choices"][0]["message"]["tool_calls"]:
        call["function"]["name"] = "other"


def wrong_json(body: dict[str, Any], answer: dict[str, Any]) -> None:
    if "response_format" in body:
        answer["choices"][0]["message"]["content"] = '{"on": 1}'


def wrong_finish(body: dict[str, Any], answer: dict[str, Any]) -> None:
    answer["choices"][0]["finish_reason"] = "stop"


def other_stream(body: dict[str, Any], answer: dict[str, Any]) -> None:
    if body.get("stream") and answer["choices"][0]["message"]["content"]:
        answer["choices"][0]["message"]["content"] += "!"


def blind(body: dict[str, Any], answer: dict[str, Any]) -> None:
    answer["usage"]["prompt_tokens"] = 9


def nameless_call(body: dict[str, Any], answer: dict[str, Any]) -> None:
    for call in answer["choices"][0]["message"]["tool_calls"]:
        call["id"] = ""


@pytest.mark.parametrize(
    ("fault", "failing"),
    [
        (calls_nothing, {TRIGGERS[2]}),
        (wrong_arguments, {SCHEMA_AUTO, SCHEMA_FORCED}),
        (unknown_tool, {SCHEMA_AUTO, SCHEMA_FORCED}),
        (wrong_json, {JSON_ANSWERS}),
        (wrong_finish, {FINISH}),
        (other_stream, {TWIN}),
        (nameless_call, {STREAM}),
        (blind, {IMAGES}),
    ],
)
async def test_each_fault_fails_its_own_rows(
    server: tuple[Server, str], fault: Fault, failing: set[str]
) -> None:
    server[0].fault = fault
    card = await card_of(server[1])
    assert {name for name, verdict in verdicts(card).items() if verdict == "FAIL"} == failing
    assert not card.is_passed


async def test_random_weights_excuse_decisions_and_nothing_else(server: tuple[Server, str]) -> None:
    server[0].fault = calls_nothing
    card = await card_of(server[1], random_weights=True)
    assert card.is_passed
    assert {name for name, verdict in verdicts(card).items() if verdict == "not asserted"} == {
        *TRIGGERS,
        SCHEMA_AUTO,
    }
    server[0].fault = wrong_json
    assert not (await card_of(server[1], random_weights=True)).is_passed


async def test_a_server_that_is_not_there_fails_and_raises_nothing() -> None:
    card = await card_of("http://127.0.0.1:9/v1")
    assert not card.is_passed
    assert verdicts(card)[ANSWERED] == verdicts(card)[REFUSALS] == "FAIL"


def stream(*lines: str) -> Reply:
    reply = Reply(status=200)
    reader = StreamReader(reply)
    for line in lines:
        reader.read(line.encode())
    reader.end()
    return reply


def frame(delta: dict[str, Any], finish: str | None = None) -> str:
    return f"data: {json.dumps({'choices': [{'index': 0, 'delta': delta, 'finish_reason': finish}]})}"


USAGE = 'data: {"choices":[],"usage":{"prompt_tokens":1,"completion_tokens":1}}'
DONE = "data: [DONE]"
CALLED = (frame({}, "tool_calls"), USAGE, DONE)
EMPTY = {"index": 0, "function": {"arguments": ""}}
BEGUN = {"index": 0, "id": "a", "type": "function", "function": {"name": "f", "arguments": ""}}


@pytest.mark.parametrize(
    ("lines", "flaw"),
    [
        ([frame({}, "stop"), USAGE], "no [DONE]"),
        ([frame({"content": "a"}), USAGE, DONE], "no finish_reason"),
        ([frame({}, "stop"), DONE], "no usage"),
        ([frame({}, "stop"), USAGE, USAGE, DONE], "more than one usage"),
        ([frame({}, "stop"), frame({"content": "a"}), USAGE, DONE], "a choice after its finish_reason"),
        ([frame({}, "stop"), USAGE, DONE, DONE], "something after [DONE]"),
        ([frame({"content": 6}), frame({}, "stop"), USAGE, DONE], "content that is no string"),
        (['data: {"response":""}', frame({}, "stop"), USAGE, DONE], "a frame without choices"),
        (["event: x", frame({}, "stop"), USAGE, DONE], "a line that is no data"),
        ([frame({"tool_calls": [{**BEGUN, "index": 1}]}), *CALLED], "a call whose index is not the next"),
        ([frame({"tool_calls": [BEGUN]}), frame({"tool_calls": [EMPTY]}), *CALLED],
         "an empty delta of a call"),
        ([frame({"tool_calls": [BEGUN, BEGUN]}), *CALLED], "id or name in a later delta of a call"),
    ],
)  # fmt: skip
def test_every_flaw_of_a_stream_is_seen(lines: list[str], flaw: str) -> None:
    assert flaw in stream(*lines).flaws


def test_a_stream_without_flaws_is_put_together() -> None:
    more = {"tool_calls": [{"index": 0, "function": {"arguments": '{"a":1}'}}]}
    reply = stream(
        ": a comment", frame({"role": "assistant", "content": ""}), frame({"reasoning_content": "hm"}),
        frame({"tool_calls": [BEGUN]}), frame(more), frame({}, "tool_calls"), USAGE, DONE,
    )  # fmt: skip
    assert reply.flaws == []
    assert (reply.content, reply.reasoning) == (None, "hm")
    assert reply.calls == [["a", "f", '{"a":1}']]
    assert reply.inconsistency(10) == ""


@pytest.mark.parametrize(
    ("reply", "problem"),
    [
        (Reply(content="a", finish_reason="stop", usage={"completion_tokens": 9}), ""),
        (Reply(content="a", finish_reason="done"), "finish_reason is 'done'"),
        (Reply(content="a", finish_reason="tool_calls"), "with 0 calls"),
        (Reply(content="a", finish_reason="length", usage={"completion_tokens": 9}), "after 9 of 10 tokens"),
        (Reply(content="a", finish_reason="length", usage={"completion_tokens": 10}), ""),
        (Reply(content="a", finish_reason="stop", usage={"completion_tokens": 11}), "11 tokens where 10"),
        (Reply(content=None, finish_reason="stop"), "content is null"),
    ],
)
def test_finish_reasons_are_held_against_the_answer(reply: Reply, problem: str) -> None:
    found = reply.inconsistency(10)
    assert problem in found
    assert bool(found) == bool(problem)


def test_trigger_scores_are_those_of_the_textbook() -> None:
    counts = Counter(tp=6, fp=2, fn=4, tn=8)
    precision, recall, f1 = (trigger_score(name, counts) for name in TRIGGERS)
    assert (precision, recall) == (0.75, 0.6)
    assert f1 == pytest.approx(2 * 0.75 * 0.6 / 1.35)
    assert [trigger_score(name, Counter(tn=3)) for name in TRIGGERS] == [0.0, 0.0, 0.0]
    assert [trigger_score(name, Counter()) for name in TRIGGERS] == [None, None, None]


def test_a_row_that_judged_nothing_fails_unless_it_may_be_empty() -> None:
    card = Scorecard(
        [RowKind("a", "", 1.0), RowKind("b", "", 1.0, may_be_empty=True)], has_random_weights=False
    )
    card.add(Mark("a", "cut"))
    assert verdicts(card) == {"a": "FAIL", "b": "pass"}
    card.add(Mark("a", GOOD))
    assert card.is_passed
    card.add(Mark("a", BAD, "why"))
    assert not card.is_passed
    assert card.as_json()["rows"][0]["examples"] == ["why"]


def test_arguments_are_judged_by_tool_and_schema() -> None:
    assert judge_call("a", "get_weather", '{"city": "Oslo"}', TOOLS).outcome == GOOD
    for name, arguments in (("other", "{}"), ("get_weather", "{}"), ("get_weather", "{")):
        assert judge_call("a", name, arguments, TOOLS).outcome == BAD
    assert schema_problem('{"on": "swordfish"}', ON) == "type at $.on"


def test_the_picture_is_one() -> None:
    data = base64.b64decode(png_url(224).partition(",")[2])
    with Image.open(BytesIO(data)) as image:
        image.load()
        assert (image.format, image.size, image.getpixel((9, 9))) == ("PNG", (224, 224), 128)


def test_schemas_that_are_no_object_become_one_argument() -> None:
    assert as_arguments(ON) is ON
    assert as_arguments({"type": "string"})["properties"]["value"] == {"type": "string"}
    moved = as_arguments({"$id": "x", "$defs": {"a": {"type": "null"}}, "anyOf": [{"$ref": "#/$defs/a"}]})
    assert schema_problem('{"value": null}', moved) == ""
    assert schema_problem('{"value": 1}', moved) != ""


def test_the_vendors_schemas_are_read() -> None:
    folder = shared_data("tool-schemas/validator_cases__TestAnyOf__valid.jsonl").parent
    schemas = load_schemas(folder)
    assert len(schemas) > 200
    assert all(schema["type"] in ("object", ["object"]) for _, schema in schemas)


def test_labelled_conversations_are_read_in_the_vendors_form(tmp_path: Path) -> None:
    entry = {"messages": [{"role": "user", "content": "hi"}], "tools": TOOLS, "finish_reason": "tool_calls"}
    path = tmp_path / "labels.jsonl"
    path.write_text(f"{json.dumps(entry)}\n\n{json.dumps({**entry, 'finish_reason': 'stop'})}\n")
    assert [case.calls for case in load_trigger_cases(path)] == [True, False]
    path.write_text('{"messages": []}\n')
    with pytest.raises(ValueError, match=r"labels\.jsonl:1"):
        load_trigger_cases(path)


def test_a_limit_takes_some_of_everywhere() -> None:
    assert spread(range(100), 4) == [0, 25, 50, 75]
    assert spread(range(3), 4) == spread(range(3), 0) == [0, 1, 2]


def test_the_tiny_kimi_is_served_from_the_installations_own_configuration() -> None:
    shipped = yaml.safe_load((ROOT / "config.yaml").read_text())
    config = decode_config(yaml.safe_dump(_changed(shipped)).encode())
    assert config.local_model.id == "kimi-k2.5-tiny"
    assert config.replicas.count == 1
    assert config.gateway.port != config.replicas.base_port
