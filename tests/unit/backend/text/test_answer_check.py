"""The second look at an answer: what it finds, what it leaves to the grammar, and that it always ends."""

from __future__ import annotations

import json
import time
from collections import Counter
from typing import Any

import pytest

from backend.text.answer_check import BrokenSchemaError, UnjudgedError, check_answer
from backend.text.json_text import read_json
from tests.support.shared_data import shared_data


def look(schema: Any, text: str, max_steps: int = 10_000) -> None:
    check_answer(schema, text, max_steps=max_steps)


@pytest.mark.parametrize(
    ("schema", "text"),
    [
        (True, "1"),
        ({}, '{"a":1}'),
        ({"type": "object", "properties": {"a": {"type": "integer"}}, "required": ["a"]}, '{"a": 1}'),
        ({"type": "number"}, "1e999"),
        ({"multipleOf": 0.01}, "65.41"),
        ({"type": "array", "items": [{"type": "string"}]}, '["a", 1]'),
        ({"$ref": "#/$defs/a", "$defs": {"a": {"const": 1}}}, "1"),
        ({"type": "string", "format": "date"}, '"formats are for grammars"'),
        ({"additionalProperties": False, "patternProperties": {"^x": {}}}, '{"x1": 1}'),
    ],
)
def test_what_meets_its_schema(schema: Any, text: str) -> None:
    look(schema, text)


@pytest.mark.parametrize(
    ("schema", "text", "keyword", "place"),
    [
        ({"type": "object"}, '{"a":', "", "$"),
        ({"type": "object"}, "NaN", "", "$"),
        ({"type": "object"}, "[]", "type", "$"),
        ({"properties": {"a": {"maximum": 5}}}, '{"a": 1e999}', "maximum", "$.a"),
        ({"multipleOf": 0.01}, "65.415", "multipleOf", "$"),
        ({"items": {"required": ["b"]}}, '[{"b": 1}, {}]', "required", "$[1]"),
        ({"additionalProperties": False, "properties": {"a": {}}}, '{"b": 1}', "additionalProperties", "$"),
        ({"anyOf": [{"const": 1}, {"const": 2}]}, "3", "anyOf", "$"),
        ({"items": [{"type": "string"}]}, "[1]", "type", "$[0]"),
        ({"$ref": "#/$defs/a", "$defs": {"a": {"const": 1}}}, "2", "const", "$"),
    ],
)
def test_what_does_not_is_named_by_keyword_and_place(
    schema: Any, text: str, keyword: str, place: str
) -> None:
    with pytest.raises(BrokenSchemaError) as error:
        look(schema, text)
    assert (error.value.keyword, error.value.place) == (keyword, place)


def test_patterns_of_strangers_are_not_run() -> None:
    """One that takes this reader for ever, and a grammar no time."""
    started_at = time.perf_counter()
    schema = {"properties": {"a": {"pattern": "^(a+)+$"}}, "patternProperties": {"^(a+)+$": {"const": 1}}}
    look(schema, json.dumps({"a": "a" * 60 + "b", "a" * 60 + "b": 2}))
    assert time.perf_counter() - started_at < 1


def test_work_is_bounded() -> None:
    """Every level doubles what there is to try; nothing of it fits."""
    schema: Any = {
        "anyOf": [{"items": {"$ref": "#"}, "maxItems": 1}, {"items": {"$ref": "#"}, "minItems": 2}]
    }
    schema["anyOf"] = [{**each, "type": ["array"]} for each in schema["anyOf"]]
    started_at = time.perf_counter()
    with pytest.raises((UnjudgedError, BrokenSchemaError)) as error:
        look({**schema, "anyOf": schema["anyOf"] * 2}, "[" * 40 + "1" + "]" * 40, max_steps=5000)
    assert isinstance(error.value, UnjudgedError)
    assert time.perf_counter() - started_at < 5


@pytest.mark.parametrize(
    "schema", [{"$ref": "http://example.com/a"}, {"type": "strung"}, {"multipleOf": "x"}, {"$ref": "#"}]
)
def test_what_this_reader_does_not_understand_is_not_judged(schema: Any) -> None:
    with pytest.raises(UnjudgedError):
        look(schema, "7")


def test_real_schemas_are_all_judged_and_almost_all_alike() -> None:
    """Patterns and formats are the grammar's own; for the rest both readers agree."""
    lines = shared_data("json-schemas/maskbench-400.jsonl").read_text().splitlines()
    counts: Counter[str] = Counter()
    for case in map(json.loads, lines):
        for instance in case["tests"]:
            try:
                look(case["schema"], json.dumps(instance["data"]), 100_000)
                is_valid = True
            except BrokenSchemaError:
                is_valid = False
            except UnjudgedError:
                counts["unjudged"] += 1
                continue
            counts["alike" if is_valid == instance["valid"] else f"said {is_valid}"] += 1
    assert counts["said False"] == 0, "a good answer would be called broken"
    assert counts["unjudged"] <= 2, counts
    assert counts["said True"] < 0.08 * counts["alike"], counts


@pytest.mark.parametrize(
    "text",
    [
        '{"a":1e999}', '{"a":-1E+400}', '{"a":"\\ud800"}', '{"a":"\\udc00\\ud800"}', '{"a":1, "a":2}',
        '{"a":' + "9" * 5000 + "}", ' {"a" : 0.1e-999 } ', '{"a":"\U0001f600"}',
    ],
)  # fmt: skip
def test_everything_that_is_json_is_read(text: str) -> None:
    assert set(read_json(text)) == {"a"}


@pytest.mark.parametrize(
    "text", ["", "{", "NaN", "[Infinity]", "[-Infinity]", "{'a':1}", '{"a":01}', "[" * 100_000, '"\n"', "1 2"]
)
def test_nothing_else_is(text: str) -> None:
    with pytest.raises(ValueError):  # noqa: PT011 - whose words these are does not matter
        read_json(text)
