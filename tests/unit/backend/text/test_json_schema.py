"""Which schemas have answers that end."""

from __future__ import annotations

from typing import Any

import pytest

from backend.text.json_schema import MAX_DEPTH, SchemaError, check_schema, walk_schemas

NODE = {"type": "object", "required": ["next"], "properties": {"next": {"$ref": "#/$defs/node"}}}


@pytest.mark.parametrize(
    ("schema", "path"),
    [
        ({"$ref": "#/$defs/n", "$defs": {"n": {"$ref": "#/$defs/n"}}}, ("$ref",)),
        ({"$ref": "#"}, ("$ref",)),
        (
            {"type": "object", "required": ["a"], "properties": {"a": {"$ref": "#"}}},
            ("properties", "a", "$ref"),
        ),
        ({"type": "array", "minItems": 1, "items": {"$ref": "#"}}, ("items", "$ref")),
        ({"$anchor": "r", "type": "array", "minItems": 1, "items": {"$ref": "#r"}}, ("items", "$ref")),
        (
            {"$id": "https://x.y/z", "type": "array", "minItems": 1, "items": {"$ref": "https://x.y/z"}},
            ("items", "$ref"),
        ),
        ({"$id": "https://x.y/z", "type": "array", "minItems": 1, "items": {"$ref": "z"}}, ("items", "$ref")),
        (
            {"$defs": {"n": {"$id": "n.json", "type": "array", "minItems": 1, "items": {"$ref": "#"}}}},
            ("$defs", "n", "items", "$ref"),
        ),
        (
            {"type": "object", "minProperties": 1, "additionalProperties": {"$ref": "#"}},
            ("additionalProperties", "$ref"),
        ),
        (
            # Only an optional member never ends: an answer that has begun it would be lost all the same.
            {"properties": {"a": {"$ref": "#/$defs/node"}}, "$defs": {"node": NODE}},
            ("properties", "a", "$ref"),
        ),
        (
            {
                "$ref": "#/$defs/a",
                "$defs": {"a": {"$ref": "#/$defs/b"}, "b": {"allOf": [{"$ref": "#/$defs/a"}]}},
            },
            ("$ref",),
        ),
    ],
)
def test_a_schema_that_never_ends_is_named_by_its_reference(schema: Any, path: tuple[str, ...]) -> None:
    """BR-48."""
    with pytest.raises(SchemaError, match="leads back to itself") as error:
        check_schema(schema)
    assert error.value.path == path


@pytest.mark.parametrize(
    "schema",
    [
        True,
        {},
        {"type": "object", "properties": {"a": {"$ref": "#"}}},
        {"type": "array", "items": {"$ref": "#"}},
        {"$anchor": "r", "type": "array", "items": {"$ref": "#r"}},
        {"$defs": {"n": {"$id": "n.json", "$anchor": "a", "type": "null"}}, "$ref": "n.json#a"},
        {"type": "object", "minProperties": 1, "additionalProperties": {"type": "null"}},
        {"type": "object", "minProperties": 1, "properties": {"a": {"$ref": "#"}, "b": {"type": "null"}}},
        {"type": "object", "required": ["a", "b"], "minProperties": 2},
        {"enum": [{"a": 1, "b": 2}], "minProperties": 2},
        {"anyOf": [{"type": "null"}, {"type": "array", "minItems": 1, "items": {"$ref": "#"}}]},
        {
            "$ref": "#/definitions/list",
            "definitions": {
                "list": {
                    "type": "object",
                    "required": ["rest"],
                    "properties": {"rest": {"oneOf": [{"$ref": "#/definitions/list"}, {"type": "null"}]}},
                }
            },
        },
        {"$ref": "#/$defs/a~1b", "$defs": {"a/b": {"enum": [1]}}},
        {"$ref": "#named", "$defs": {"n": {"$anchor": "named"}}},
        {"required": ["a"], "properties": {"a": {"const": 1}}},
    ],
)
def test_a_schema_that_can_end_passes(schema: Any) -> None:
    check_schema(schema)


def test_effort_is_bounded() -> None:
    deep: dict[str, Any] = {}
    for _ in range(MAX_DEPTH + 1):
        deep = {"items": deep}
    with pytest.raises(SchemaError, match="nested more than"):
        check_schema(deep)
    chain = {f"n{index}": {"$ref": f"#/$defs/n{index + 1}"} for index in range(3000)}
    with pytest.raises(SchemaError, match="chain too long"):
        check_schema({"$ref": "#/$defs/n0", "$defs": chain})


@pytest.mark.parametrize(
    ("schema", "path"),
    [
        ({"type": "object", "minProperties": 2}, ("minProperties",)),
        (
            {"type": "array", "items": {"type": "object", "required": ["a"], "minProperties": 2}},
            ("items", "minProperties"),
        ),
    ],
)
def test_more_members_than_names_that_are_required_are_not_counted(
    schema: Any, path: tuple[str, ...]
) -> None:
    """Names of members may be said twice, so no grammar can count to two."""
    with pytest.raises(SchemaError, match="is not supported above the number of required") as error:
        check_schema(schema)
    assert error.value.path == path


@pytest.mark.parametrize("schema", [None, 1, "string", []])
def test_what_is_no_schema(schema: Any) -> None:
    with pytest.raises(SchemaError, match="must be a JSON schema"):
        check_schema(schema)


def test_properties_named_like_keywords_are_no_keywords() -> None:
    schema = {"properties": {"not": {"type": "string"}, "$ref": {"type": "null"}}}
    check_schema(schema)
    assert [path for path, _ in walk_schemas(schema)] == [(), ("properties", "not"), ("properties", "$ref")]
