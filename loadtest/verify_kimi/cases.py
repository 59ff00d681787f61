"""What is asked: conversations whose right decision is known, and schemas for arguments."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any


@dataclass(frozen=True)
class TriggerCase:
    """A conversation, its tools, and whether a good model calls one now."""

    name: str
    messages: list[dict[str, Any]]
    tools: list[dict[str, Any]]
    calls: bool


def function(name: str, description: str, properties: dict[str, Any], *required: str) -> dict[str, Any]:
    """A tool in the OpenAI form."""
    parameters = {"type": "object", "properties": properties, "required": list(required)}
    return {
        "type": "function",
        "function": {"name": name, "description": description, "parameters": parameters},
    }


_TEXT = {"type": "string"}
WEATHER = function("get_weather", "The weather of a city now.", {"city": _TEXT}, "city")
SEARCH = function(
    "search_files", "Search the files of the project.", {"pattern": _TEXT, "folder": _TEXT}, "pattern"
)
MAIL = function(
    "send_mail", "Send a mail.", {"to": _TEXT, "subject": _TEXT, "text": _TEXT}, "to", "subject", "text"
)
CONVERT = function(
    "convert_currency",
    "Convert an amount at today's rate.",
    {"amount": {"type": "number"}, "from": _TEXT, "to": _TEXT},
    "amount",
    "from",
    "to",
)
TOOLS = [WEATHER, SEARCH, MAIL, CONVERT]

_CALLED = (
    "What is the weather in Oslo right now?",
    "Is it raining in Lisbon and in Porto at the moment?",
    "Find every place in the project that mentions max_bytes.",
    "How much are 250 US dollars in euros today?",
    "Send a mail to ada@example.com, subject 'Lunch', that says I will be ten minutes late.",
    "Look in the folder src for the function parse_config.",
    "Check whether I need an umbrella in Hamburg today.",
    "Convert 12,000 yen to Swiss francs at today's rate.",
)
_NOT_CALLED = (
    "Write a haiku about the sea.",
    "What is the capital of France?",
    "Thank you, that is all for today.",
    "Explain in one sentence what a hash table is.",
    "What is 17 times 3?",
    "Translate 'good morning' into Spanish.",
    "Which tools do you have? Just list their names.",
    "Give me three names for a cat.",
)


def own_trigger_cases() -> list[TriggerCase]:
    """Questions that plainly need one of the tools, and others that plainly do not."""
    asked = [(text, True) for text in _CALLED] + [(text, False) for text in _NOT_CALLED]
    return [
        TriggerCase(f"own-{index}", [{"role": "user", "content": text}], TOOLS, calls)
        for index, (text, calls) in enumerate(asked)
    ]


def load_trigger_cases(path: Path) -> list[TriggerCase]:
    """Requests with the finish reason that the vendor's own service gave: one JSON object a line, with
    ``messages``, ``tools`` and ``finish_reason`` (or ``expected_finish_reason``).

    Raises:
        ValueError: naming the line that is of another form.
    """
    cases = []
    for number, line in enumerate(path.read_text().splitlines(), 1):
        if not line.strip():
            continue
        try:
            entry = json.loads(line)
            expected = entry.get("expected_finish_reason") or entry["finish_reason"]
            request = entry.get("request") or entry
            cases.append(
                TriggerCase(
                    f"{path.name}:{number}", request["messages"], request["tools"], expected == "tool_calls"
                )
            )
        except (ValueError, KeyError, AttributeError, TypeError) as error:
            raise ValueError(f"{path}:{number}: {error!r}") from error
    return cases


OWN_SCHEMAS: Sequence[dict[str, Any]] = (
    {"type": "object", "properties": {"on": {"type": "boolean"}}, "required": ["on"]},
    {
        "type": "object",
        "properties": {
            "unit": {"enum": ["c", "f"]},
            "days": {"type": "integer", "minimum": 1, "maximum": 14},
        },
        "required": ["unit", "days"],
        "additionalProperties": False,
    },
    {
        "type": "object",
        "properties": {"codes": {"type": "array", "items": {"type": "integer", "maximum": 9}, "maxItems": 3}},
        "required": ["codes"],
        "additionalProperties": False,
    },
    {
        "$defs": {"flag": {"type": ["boolean", "null"]}},
        "type": "object",
        "properties": {"a": {"$ref": "#/$defs/flag"}, "b": {"anyOf": [{"const": 1}, {"const": "one"}]}},
        "required": ["a", "b"],
        "additionalProperties": False,
    },
    {
        "type": "object",
        "properties": {"code": {"type": "string", "minLength": 2, "maxLength": 4, "pattern": "^[A-Z]+$"}},
        "required": ["code"],
        "additionalProperties": False,
    },
)


def load_schemas(folder: Path | None) -> list[tuple[str, dict[str, Any]]]:
    """Schemas for arguments: those of a folder (``*.jsonl``, one a line), or a few of our own."""
    if folder is None:
        return [(f"own-{index}", schema) for index, schema in enumerate(OWN_SCHEMAS)]
    return [
        (f"{path.stem}:{number}", as_arguments(json.loads(line)))
        for path in sorted(folder.glob("*.jsonl"))
        for number, line in enumerate(path.read_text().splitlines(), 1)
        if line.strip()
    ]


def as_arguments(schema: Any) -> dict[str, Any]:
    """A schema as one of arguments, which are an object: any other becomes that of one argument."""
    if isinstance(schema, dict) and schema.get("type") in ("object", ["object"]):
        return schema
    inner = _moved(schema, "#/properties/value")
    return {"type": "object", "properties": {"value": inner}, "required": ["value"]}


def _moved(value: Any, to: str) -> Any:
    """A schema whose references within itself hold where it stands now."""
    if isinstance(value, list):
        return [_moved(each, to) for each in value]
    if not isinstance(value, dict):
        return value
    moved = {key: _moved(each, to) for key, each in value.items() if key != "$id"}
    reference = moved.get("$ref")
    if isinstance(reference, str) and reference.startswith("#"):
        moved["$ref"] = to + reference[1:]
    return moved
