"""Tools as the model was trained to read them: TypeScript types, or compact JSON where those cannot say it.

The form is the model's own and is matched byte for byte, its oddities included: what a schema says beyond
the handled keywords is left out, and a schema that cannot be expressed at all makes *all* tools fall back to
JSON. Keys are sorted at every depth first, so the same tools always give the same text.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from typing import Any, Final

_INDENT: Final = "  "
_SCALAR_CONSTRAINTS: Final[Mapping[str, tuple[str, ...]]] = {
    "string": ("maxLength", "minLength", "pattern"),
    "number": ("maximum", "minimum"),
    "integer": ("maximum", "minimum"),
    "array": ("maxItems", "minItems"),
}
_UNION_TYPES: Final[Mapping[str, str]] = {
    "string": "string",
    "number": "number",
    "integer": "number",
    "boolean": "boolean",
    "null": "null",
    "object": "{}",
    "array": "Array<any>",
}
_ENUM_TYPES: Final[Mapping[str, type | tuple[type, ...]]] = {
    "string": str,
    "number": (int, float),
    "integer": int,
    "boolean": bool,
}
_ROOT_INTERFACE: Final = "parameters"


class _InexpressibleError(ValueError):
    """A schema has no form in the declaration language."""


def declare_tools(tools: Sequence[Mapping[str, Any]]) -> str:
    """The text of the tool declaration.

    Args:
        tools: declarations in the OpenAI form, not empty.
    """
    ordered = _sorted_deeply(list(tools))
    try:
        declared = _declare_in_typescript(ordered)
    except (_InexpressibleError, AttributeError, KeyError, TypeError):
        # Besides what is inexpressible: schemas that are no schemas, such as a description that is a number.
        declared = ""
    return declared or json.dumps(ordered, ensure_ascii=False, separators=(",", ":"))


def _sorted_deeply(value: Any) -> Any:
    if isinstance(value, Mapping):
        return {key: _sorted_deeply(value[key]) for key in sorted(value)}
    if isinstance(value, list | tuple):
        return [_sorted_deeply(item) for item in value]
    return value


def _declare_in_typescript(tools: Sequence[Mapping[str, Any]]) -> str:
    """All tools of type function; "" when there is none."""
    functions = [
        tool["function"] for tool in tools if tool.get("type") == "function" and tool.get("function")
    ]
    if not functions:
        return ""
    declared = "\n".join(_declare_function(function) for function in functions)
    return f"# Tools\n\n## functions\nnamespace functions {{\n{declared}\n}}\n"


def _declare_function(function: Mapping[str, Any]) -> str:
    parameters = function.get("parameters") or {}
    schemas = _SchemaWriter()
    root = schemas.object_parts(parameters, "")
    name = function.get("name", "function")
    lines: list[str] = []
    if schemas.refers_to_root:
        lines.append(f"interface {_ROOT_INTERFACE} {{{_framed(root.in_order)}}}")
        signature = _ROOT_INTERFACE
    else:
        signature = root.text("")
    # Definitions found while these are written are not declared.
    for defined, schema in list(schemas.definitions.items()):
        body = schemas.type_of(schema, "")
        if description := schema.get("description", ""):
            lines.append(_comment(description, ""))
        lines.append(f"interface {defined} {body}")
    if description := function.get("description"):
        lines.append(_comment(description, ""))
    lines.append(f"type {name} = (_: {signature}) => any;")
    return "\n".join(lines)


class _ObjectParts:
    """An object's fields: ``in_order`` of their names, ``required_first``, and the rest of its keys."""

    def __init__(self, fields: Sequence[tuple[str, bool]], rest: str | None) -> None:
        self.in_order = [text for text, _ in fields]
        self._required_first = [text for text, is_required in fields if is_required]
        self._required_first += [text for text, is_required in fields if not is_required]
        self._rest = rest

    def text(self, indent: str) -> str:
        fields = list(self._required_first)
        if self._rest is not None:
            fields.append(f"{indent}{_INDENT}[k: string]: {self._rest}")
        return f"{{{_framed(fields)}{indent}}}" if fields else "{}"


class _SchemaWriter:
    """Writes the schemas of one function; learns its definitions and whether it refers to its own root."""

    def __init__(self) -> None:
        self.definitions: dict[str, Any] = {}
        self.refers_to_root = False

    def type_of(self, schema: Any, indent: str) -> str:
        """The type that a schema stands for; lines after the first begin with ``indent``."""
        if isinstance(schema, bool):
            return "any" if schema else "null"
        if not isinstance(schema, Mapping):
            raise _InexpressibleError("a schema must be an object or a boolean")
        if "$ref" in schema:
            return self._reference(schema["$ref"])
        if "anyOf" in schema:
            return " | ".join([self.type_of(choice, indent) for choice in schema["anyOf"]])
        if "enum" in schema:
            return _enumeration(schema)
        if "type" in schema:
            return self._typed(schema, indent)
        if not schema:
            return "any"
        raise _InexpressibleError("a schema without a type")

    def object_parts(self, schema: Mapping[str, Any], indent: str) -> _ObjectParts:
        self.definitions.update(schema.get("$defs") or {})
        inner = indent + _INDENT
        rest = self._rest(schema.get("additionalProperties"), inner)
        required = set(schema.get("required", ()))
        fields = [
            (self._field(name, schema["properties"][name], name in required, inner), name in required)
            for name in sorted(schema.get("properties", ()))
        ]
        return _ObjectParts(fields, rest)

    def _typed(self, schema: Mapping[str, Any], indent: str) -> str:
        kind = schema["type"]
        if isinstance(kind, list):
            return " | ".join([_UNION_TYPES[each] for each in kind])
        if not isinstance(kind, str):
            raise _InexpressibleError("a type must be a string or a list of them")
        if kind == "object":
            return self.object_parts(schema, indent).text(indent)
        if kind == "array":
            return self._array(schema.get("items"), indent)
        return "number" if kind == "integer" else kind

    def _array(self, items: Any, indent: str) -> str:
        if not items:
            return "Array<any>"
        inner = indent + _INDENT
        comments = _comments_on(items, inner)
        if not comments:
            return f"Array<{self.type_of(items, indent)}>"
        return f"Array<\n{comments}{inner}{self.type_of(items, inner)}\n{indent}>"

    def _rest(self, schema: Any, indent: str) -> str | None:
        """The type of the properties that have no name in the schema; None when it does not speak of them."""
        if schema is None:
            return None
        if isinstance(schema, bool):
            return "any" if schema else "never"
        return self.type_of(schema, indent)

    def _field(self, name: str, schema: Any, is_required: bool, indent: str) -> str:
        comments = _comments_on(schema, indent)
        default = schema.get("default") if isinstance(schema, Mapping) else None
        if default is not None:
            shown = (
                repr(default) if isinstance(default, int | float) else json.dumps(default, ensure_ascii=False)
            )
            comments += f"{indent}// Default: {shown}\n"
        mark = "" if is_required else "?"
        return f"{comments}{indent}{name}{mark}: {self.type_of(schema, indent)}"

    def _reference(self, reference: str) -> str:
        if reference == "#":
            self.refers_to_root = True
            return _ROOT_INTERFACE
        name = reference.rpartition("/")[2]
        if not reference.startswith("#/$defs/") or name not in self.definitions:
            raise _InexpressibleError("a reference that is not to a definition")
        return name


def _framed(fields: Sequence[str]) -> str:
    return "\n" + ",\n".join(fields) + "\n" if fields else ""


def _comments_on(schema: Any, indent: str) -> str:
    """The comment lines above a type: its description, then its constraints."""
    if not isinstance(schema, Mapping):
        return ""
    description = schema.get("description", "")
    comments = _comment(description, indent) + "\n" if description else ""
    # Only what is written as a plain type shows its constraints.
    is_plain = not {"$ref", "anyOf", "enum"} & schema.keys()
    kind = schema.get("type")
    names = _SCALAR_CONSTRAINTS.get(kind, ()) if is_plain and isinstance(kind, str) else ()
    constraints = ", ".join(f"{name}: {schema[name]}" for name in names if name in schema)
    return comments + f"{indent}// {constraints}\n" if constraints else comments


def _comment(description: str, indent: str) -> str:
    return "\n".join(f"{indent}// {line}" if line else "" for line in description.split("\n"))


def _enumeration(schema: Mapping[str, Any]) -> str:
    values = schema["enum"]
    if "type" in schema:
        expected = _ENUM_TYPES.get(_enumerated_type(schema["type"]))
        for value in values:
            if expected is not None and value is not None and not isinstance(value, expected):
                raise _InexpressibleError("a value of an enum is not of its type")
    return " | ".join([f'"{value}"' if isinstance(value, str) else str(value) for value in values])


def _enumerated_type(kind: Any) -> str:
    """The type of an enum's values, where null may stand beside one other."""
    if isinstance(kind, str):
        return kind
    if len(kind) == 1:
        return str(kind[0])
    if len(kind) == 2 and "null" in kind:
        return str(kind[1] if kind[0] == "null" else kind[0])
    raise _InexpressibleError("an enum of several types")
