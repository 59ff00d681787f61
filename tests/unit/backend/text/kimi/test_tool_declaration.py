"""The tool declaration, form by form. All 400 published conversations are compared elsewhere."""

from __future__ import annotations

import json
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from backend.text.kimi.tool_declaration import declare_tools


def tool(parameters: Any, **function: Any) -> dict[str, Any]:
    return {"type": "function", "function": {"name": "f", "parameters": parameters, **function}}


def fields(properties: dict[str, Any], **schema: Any) -> str:
    """The fields that a tool with these properties is declared with."""
    declared = declare_tools([tool({"type": "object", "properties": properties, **schema})])
    head = "# Tools\n\n## functions\nnamespace functions {\ntype f = (_: {\n"
    tail = "\n}) => any;\n}\n"
    assert declared.startswith(head), declared
    assert declared.endswith(tail), declared
    return declared[len(head) : -len(tail)]


def test_required_fields_come_first_and_each_group_is_in_order() -> None:
    declared = fields(
        {"b": {"type": "string"}, "d": {"type": "integer"}, "a": {"type": "boolean"}, "c": {"type": "null"}},
        required=["d", "c"],
    )
    assert declared == "  c: null,\n  d: number,\n  a?: boolean,\n  b?: string"


@pytest.mark.parametrize(
    ("schema", "text"),
    [
        ({"type": "string", "minLength": 1, "maxLength": 9}, "  // maxLength: 9, minLength: 1\n  x?: string"),
        ({"type": "number", "minimum": 0.5, "format": "f"}, "  // minimum: 0.5\n  x?: number"),
        ({"type": "integer", "default": 3}, "  // Default: 3\n  x?: number"),
        ({"type": "boolean", "default": False}, "  // Default: False\n  x?: boolean"),
        ({"type": "string", "default": "grün"}, '  // Default: "grün"\n  x?: string'),
        ({"type": "string", "default": None}, "  x?: string"),
        ({"type": "string", "description": "a\n\nb"}, "  // a\n\n  // b\n  x?: string"),
        ({"enum": ["a", 1, True, None]}, '  x?: "a" | 1 | True | None'),
        ({"enum": ["a", None], "type": ["string", "null"]}, '  x?: "a" | None'),
        ({"type": ["string", "object", "array", "integer"]}, "  x?: string | {} | Array<any> | number"),
        ({"anyOf": [{"type": "string", "minLength": 1}, {"type": "null"}]}, "  x?: string | null"),
        ({"type": "array"}, "  x?: Array<any>"),
        (
            {"type": "array", "items": {"type": "integer"}, "maxItems": 2},
            "  // maxItems: 2\n  x?: Array<number>",
        ),
        (
            {"type": "array", "items": {"type": "string", "description": "one"}},
            "  x?: Array<\n    // one\n    string\n  >",
        ),
        (
            {"type": "object", "properties": {"y": {"type": "string", "description": "deep"}}},
            "  x?: {\n    // deep\n    y?: string\n  }",
        ),
        ({"type": "object", "additionalProperties": True}, "  x?: {\n    [k: string]: any\n  }"),
        ({"type": "object"}, "  x?: {}"),
        ({}, "  x?: any"),
        (True, "  x?: any"),
        (False, "  x?: null"),
    ],
)  # fmt: skip
def test_each_form_of_a_schema(schema: Any, text: str) -> None:
    assert fields({"x": schema}) == text


def test_definitions_and_the_root_become_interfaces() -> None:
    node = {"type": "object", "description": "A node.", "properties": {"next": {"$ref": "#/$defs/Node"}}}
    parameters = {
        "type": "object",
        "$defs": {"Node": node},
        "properties": {"b": {"$ref": "#/$defs/Node"}, "a": {"$ref": "#"}},
        "required": ["b"],
        "additionalProperties": False,
    }
    assert declare_tools([tool(parameters, description="Does\nit.")]) == (
        "# Tools\n\n## functions\nnamespace functions {\n"
        "interface parameters {\n  a?: parameters,\n  b: Node\n}\n"
        "// A node.\ninterface Node {\n  next?: Node\n}\n"
        "// Does\n// it.\ntype f = (_: parameters) => any;\n}\n"
    )


@pytest.mark.parametrize(
    "schema",
    [
        {"oneOf": [{"type": "string"}]},
        {"const": 1},
        {"allOf": []},
        {"title": "untyped"},
        {"$ref": "#/definitions/x"},
        {"$ref": "#/$defs/missing"},
        {"type": "array", "items": [{"type": "string"}]},
        {"enum": [1], "type": "string"},
        {"enum": ["a"], "type": ["string", "number"]},
        {"type": ["strange"]},
        {"type": 7},
        {"type": "string", "description": 7},
        "string",
    ],
)
def test_what_cannot_be_expressed_makes_all_tools_json(schema: Any) -> None:
    tools = [tool({"type": "object", "properties": {"x": schema}}), tool({"type": "object"}, name="größe")]
    expected = json.dumps(tools, sort_keys=True, ensure_ascii=False, separators=(",", ":"))
    assert declare_tools(tools) == expected


def test_tools_of_other_kinds_are_left_out() -> None:
    odd = {"type": "_plugin", "name": "web"}
    assert declare_tools([odd, tool(None)]) == (
        "# Tools\n\n## functions\nnamespace functions {\ntype f = (_: {}) => any;\n}\n"
    )
    assert declare_tools([odd]) == '[{"name":"web","type":"_plugin"}]'


KEYWORDS = (
    "type", "properties", "items", "anyOf", "enum", "$ref", "$defs", "required", "description", "default",
    "additionalProperties", "x",
)  # fmt: skip
JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.text(max_size=8),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.sampled_from(KEYWORDS), inner, max_size=4),
    max_leaves=12,
)


@given(JSON)
def test_anything_can_be_declared_and_the_order_of_keys_does_not_matter(schema: Any) -> None:
    def reversed_keys(value: Any) -> Any:
        if isinstance(value, dict):
            return {key: reversed_keys(value[key]) for key in reversed(value)}
        return [reversed_keys(item) for item in value] if isinstance(value, list) else value

    tools = [tool({"type": "object", "properties": {"x": schema}})]
    assert declare_tools(tools) == declare_tools(reversed_keys(tools))
