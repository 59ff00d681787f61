"""The questions, and how each answer is judged. A probe gives marks and raises for nothing a server does."""

from __future__ import annotations

import base64
import json
import struct
import zlib
from collections.abc import Awaitable, Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import jsonschema

from loadtest.verify_kimi.asking import Reply
from loadtest.verify_kimi.cases import TOOLS, WEATHER, TriggerCase
from loadtest.verify_kimi.scorecard import BAD, GOOD, Mark, RowKind

Probe = Callable[["Asks"], Awaitable[list[Mark]]]

TRIGGERS = ("trigger precision", "trigger recall", "trigger F1")
SCHEMA_AUTO, SCHEMA_FORCED = "arguments, free", "arguments, forced"
ANSWERED, FINISH, STREAM, TWIN = "answered", "finish reasons", "streams well formed", "streamed = whole"
JSON_ANSWERS, REFUSALS, CHOICE_NONE, IMAGES = "JSON answers", "refusals", "tool_choice none", "images"
# An image of 224 by 224 is 64 tokens, and its marks are a few more, as many as the tokenizer makes of them.
_IMAGE_SIDE, _IMAGE_TOKENS, _MOST_MARKS = 224, 64, 20
_SEED = 7


class Asks(Protocol):
    async def ask(self, body: dict[str, Any]) -> Reply: ...


@dataclass(frozen=True)
class Bars:
    """The shares that are enough. The vendor's own bar for F1 is 0.8 (0.73 for thinking models)."""

    trigger_f1: float = 0.8
    free_arguments: float = 0.95
    same: float = 0.9


def row_kinds(bars: Bars, *, has_random_weights: bool) -> list[RowKind]:
    """The rows of the card. Random weights decide nothing, but a stream of theirs must be exact."""
    same = 1.0 if has_random_weights else bars.same
    precision, recall, f1 = TRIGGERS
    return [
        RowKind(precision, "of the calls made, those that were wanted", 0.0, is_structural=False),
        RowKind(recall, "of the calls wanted, those that were made", 0.0, is_structural=False),
        RowKind(f1, "both together, against expected labels", bars.trigger_f1, is_structural=False),
        RowKind(
            SCHEMA_AUTO, "unforced calls: a declared tool, arguments that meet its schema",
            bars.free_arguments, is_structural=False, may_be_empty=True,
        ),
        RowKind(SCHEMA_FORCED, "forced calls, not cut: one, with arguments that meet the schema", 1.0),
        RowKind(JSON_ANSWERS, "response_format answers that were not cut: they meet the schema", 1.0),
        RowKind(ANSWERED, "status 200 and no error, or a clear 400 about a schema", 1.0),
        RowKind(FINISH, "finish_reason, calls, content and token counts agree", 1.0),
        RowKind(STREAM, "one finish, one usage, [DONE]; deltas of calls as clients read them", 1.0),
        RowKind(TWIN, "the same request, streamed and whole, at temperature 0", same),
        RowKind(CHOICE_NONE, "tools are declared, and none is called", 1.0),
        RowKind(IMAGES, "an image costs the prompt tokens that it should", 1.0, may_be_empty=True),
        RowKind(REFUSALS, "what cannot be honoured is a 400, and what can is none", 1.0),
    ]  # fmt: skip


def build_probes(
    triggers: Sequence[TriggerCase], schemas: Sequence[tuple[str, dict[str, Any]]], max_tokens: int
) -> list[Probe]:
    """Every question once, in an order that mixes cheap ones and dear ones."""
    probes: list[Probe] = [
        _forced_probe(name, schema, is_stream, max_tokens)
        for name, schema in schemas
        for is_stream in (False, True)
    ]
    probes += [_trigger_probe(case, max_tokens) for case in triggers]
    probes += [_json_probe(name, schema, max_tokens) for name, schema in schemas]
    probes += [_twin_probe(case, max_tokens) for case in triggers]
    probes += [_none_probe(is_stream, max_tokens) for is_stream in (False, True)]
    probes += [_image_probe(max_tokens)]
    probes += [_refusal_probe(*each) for each in _REFUSALS]
    return probes


def instant(max_tokens: int) -> dict[str, Any]:
    """Without reasoning, so that the budget goes into what is judged."""
    return {"max_tokens": max_tokens, "chat_template_kwargs": {"thinking": False}}


def marks_of_form(reply: Reply, body: dict[str, Any]) -> Iterator[Mark]:
    """What is judged of every answer, whatever it was asked for."""
    if reply.status != 200 or reply.error:
        yield Mark(ANSWERED, BAD, f"{reply.status} {reply.error}"[:300])
        return
    yield Mark(ANSWERED, GOOD)
    problem = reply.inconsistency(body["max_tokens"])
    yield Mark(FINISH, BAD if problem else GOOD, problem)
    if body.get("stream"):
        yield Mark(STREAM, BAD if reply.flaws else GOOD, "; ".join(reply.flaws))


def _trigger_probe(case: TriggerCase, max_tokens: int) -> Probe:
    body = {"messages": case.messages, "tools": case.tools, "tool_choice": "auto", "max_tokens": max_tokens}

    async def probe(server: Asks) -> list[Mark]:
        reply = await server.ask(body)
        marks = list(marks_of_form(reply, body))
        if reply.status == 200 and not reply.error:
            word = {(True, True): "tp", (True, False): "fp", (False, True): "fn", (False, False): "tn"}
            outcome = word[bool(reply.calls), case.calls]
            marks += [Mark(row, outcome) for row in TRIGGERS]
            marks += [
                judge_call(SCHEMA_AUTO, name, arguments, case.tools) for _, name, arguments in reply.calls
            ]
        return marks

    return probe


def _forced_probe(name: str, schema: dict[str, Any], is_stream: bool, max_tokens: int) -> Probe:
    tool = {"type": "function", "function": {"name": "submit", "description": name, "parameters": schema}}
    body = {
        "messages": [{"role": "user", "content": "Call submit with arguments of your choice."}],
        "tools": [{**tool, "function": {**tool["function"], "strict": True}}],  # type: ignore[dict-item]
        "tool_choice": {"type": "function", "function": {"name": "submit"}},
        "stream": is_stream,
        **instant(max_tokens),
    }

    async def probe(server: Asks) -> list[Mark]:
        reply = await server.ask(body)
        if is_clear_refusal(reply):
            return [Mark(SCHEMA_FORCED, "refused"), Mark(ANSWERED, GOOD)]
        marks = list(marks_of_form(reply, body))
        if reply.status != 200 or reply.error:
            return marks
        if reply.is_cut(max_tokens):
            return [*marks, Mark(SCHEMA_FORCED, "cut")]
        if len(reply.calls) != 1:
            return [*marks, Mark(SCHEMA_FORCED, BAD, f"{name}: {len(reply.calls)} calls")]
        _, called, arguments = reply.calls[0]
        return [*marks, judge_call(SCHEMA_FORCED, called, arguments, [tool])]

    return probe


def _json_probe(name: str, schema: dict[str, Any], max_tokens: int) -> Probe:
    body = {
        "messages": [{"role": "user", "content": "Answer in JSON."}],
        "response_format": {"type": "json_schema", "json_schema": {"name": "answer", "schema": schema}},
        **instant(max_tokens),
    }

    async def probe(server: Asks) -> list[Mark]:
        reply = await server.ask(body)
        if is_clear_refusal(reply):
            return [Mark(JSON_ANSWERS, "refused"), Mark(ANSWERED, GOOD)]
        marks = list(marks_of_form(reply, body))
        if reply.status != 200 or reply.error:
            return marks
        if reply.is_cut(max_tokens):
            return [*marks, Mark(JSON_ANSWERS, "cut")]
        problem = schema_problem(reply.content or "", schema)
        return [*marks, Mark(JSON_ANSWERS, BAD if problem else GOOD, f"{name}: {problem}")]

    return probe


def _twin_probe(case: TriggerCase, max_tokens: int) -> Probe:
    body = {
        "messages": case.messages, "tools": case.tools, "temperature": 0, "seed": _SEED,
        "max_tokens": min(max_tokens, 256),
    }  # fmt: skip

    async def probe(server: Asks) -> list[Mark]:
        whole, streamed = await server.ask(body), await server.ask({**body, "stream": True})
        marks = [*marks_of_form(whole, body), *marks_of_form(streamed, {**body, "stream": True})]
        if whole.status == streamed.status == 200 and not whole.error + streamed.error:
            is_same = whole.said() == streamed.said()
            marks.append(Mark(TWIN, GOOD if is_same else BAD, case.name))
        return marks

    return probe


def _none_probe(is_stream: bool, max_tokens: int) -> Probe:
    body = {
        "messages": [{"role": "user", "content": "What is the weather in Oslo right now?"}],
        "tools": TOOLS, "tool_choice": "none", "stream": is_stream, **instant(max_tokens),
    }  # fmt: skip

    async def probe(server: Asks) -> list[Mark]:
        reply = await server.ask(body)
        is_good = reply.status == 200 and not reply.calls
        return [*marks_of_form(reply, body), Mark(CHOICE_NONE, GOOD if is_good else BAD, reply.error)]

    return probe


def _image_probe(max_tokens: int) -> Probe:
    text = {"type": "text", "text": "Describe the image."}
    image = {"type": "image_url", "image_url": {"url": png_url(_IMAGE_SIDE)}}

    async def probe(server: Asks) -> list[Mark]:
        bodies = [
            {"messages": [{"role": "user", "content": parts}], **instant(min(max_tokens, 32))}
            for parts in ([text], [image, text])
        ]
        without, with_image = [await server.ask(body) for body in bodies]
        marks = list(marks_of_form(without, bodies[0]))
        if is_clear_refusal(with_image):
            return [*marks, Mark(IMAGES, "refused")]
        marks += marks_of_form(with_image, bodies[1])
        cost = with_image.usage.get("prompt_tokens", 0) - without.usage.get("prompt_tokens", 0)
        is_good = _IMAGE_TOKENS < cost <= _IMAGE_TOKENS + _MOST_MARKS
        return [*marks, Mark(IMAGES, GOOD if is_good else BAD, f"{cost} prompt tokens")]

    return probe


def png_url(side: int) -> str:
    """A grey square as a ``data:`` URL."""

    def chunk(kind: bytes, data: bytes) -> bytes:
        checksum = zlib.crc32(kind + data)
        return struct.pack(">I", len(data)) + kind + data + struct.pack(">I", checksum)

    head = struct.pack(">IIBBBBB", side, side, 8, 0, 0, 0, 0)
    pixels = zlib.compress((b"\0" + b"\x80" * side) * side)
    png = b"\x89PNG\r\n\x1a\n" + chunk(b"IHDR", head) + chunk(b"IDAT", pixels) + chunk(b"IEND", b"")
    return f"data:image/png;base64,{base64.b64encode(png).decode()}"


_HI = {"messages": [{"role": "user", "content": "hi"}], "max_tokens": 4}
# What is asked, and whether it must be refused.
_REFUSALS: Sequence[tuple[str, dict[str, Any], bool]] = (
    ("required without tools", {**_HI, "tool_choice": "required"}, True),
    ("required with no tools", {**_HI, "tool_choice": "required", "tools": []}, True),
    ("a choice that is none", {**_HI, "tool_choice": "bogus", "tools": [WEATHER]}, True),
    (
        "a tool that is not declared",
        {**_HI, "tools": [WEATHER], "tool_choice": {"type": "function", "function": {"name": "other"}}},
        True,
    ),
    ("a format that is none", {**_HI, "response_format": {"type": "xml"}}, True),
    ("a schema that is none", {**_HI, "response_format": {"type": "json_schema", "json_schema": 7}}, True),
    ("a wrong temperature", {**_HI, "temperature": "hot"}, True),
    ("no choice without tools", {**_HI, "tool_choice": "none"}, False),
    ("a free choice without tools", {**_HI, "tool_choice": "auto"}, False),
    ("plain text", {**_HI, "response_format": {"type": "text"}}, False),
    ("the defaults", _HI, False),
)


def _refusal_probe(name: str, body: dict[str, Any], is_wrong: bool) -> Probe:
    async def probe(server: Asks) -> list[Mark]:
        reply = await server.ask(body)
        is_good = reply.status == (400 if is_wrong else 200)
        return [Mark(REFUSALS, GOOD if is_good else BAD, f"{name}: {reply.status}")]

    return probe


def is_clear_refusal(reply: Reply) -> bool:
    """A 400 that says something about a schema: allowed, and counted."""
    return reply.status == 400 and len(reply.error) > 20


def judge_call(row: str, name: str, arguments: str, tools: Sequence[dict[str, Any]]) -> Mark:
    """Whether a call names a declared tool with arguments that meet its schema."""
    declared = {tool["function"]["name"]: tool["function"].get("parameters") or {} for tool in tools}
    if name not in declared:
        return Mark(row, BAD, f"{name!r} is not declared")
    problem = schema_problem(arguments, declared[name])
    return Mark(row, BAD if problem else GOOD, f"{name}: {problem}")


def schema_problem(text: str, schema: Any) -> str:
    """What is wrong with a JSON text, or nothing. Never the text itself."""
    try:
        value = json.loads(text)
    except (ValueError, RecursionError):
        return "is no JSON"
    kind = jsonschema.validators.validator_for(schema, default=jsonschema.Draft202012Validator)
    error = jsonschema.exceptions.best_match(kind(schema).iter_errors(value))
    return "" if error is None else f"{error.validator} at {error.json_path}"
