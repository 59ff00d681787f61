"""Which tool a call means, and whether its arguments can be used."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from typing import Any, Final

from backend.text.json_text import read_json

_INDEX: Final = re.compile(r":\d+$")
_NUMBER: Final = re.compile(r"_\d+$")
_PREFIX: Final = "functions."
# What can be the name of a tool that nobody declared.
_NAME: Final = re.compile(r"\S{1,256}")
# Ids that name no tool: numbers, and the kinds that other services issue.
_OPAQUE: Final = re.compile(
    r"\d*"
    r"|call[_-]?[0-9a-fA-F]*"
    r"|(call|toolu|tooluse|fc|chatcmpl-tool)[_-][\w-]{6,}"
    r"|[0-9a-fA-F]{8}(-[0-9a-fA-F]{4}){3}-[0-9a-fA-F]{12}"
)
_JSON_TYPES: Final[Mapping[str, type | tuple[type, ...]]] = {
    "string": str,
    "number": (int, float),
    "integer": int,
    "boolean": bool,
    "null": type(None),
    "array": list,
    "object": dict,
}


class DeclaredTools:
    """The tools of one request.

    Args:
        tools: declarations in the OpenAI form.
    """

    def __init__(self, tools: Sequence[Mapping[str, Any]]) -> None:
        functions = [tool["function"] for tool in tools if isinstance(tool.get("function"), Mapping)]
        self._schemas: dict[str, Mapping[str, Any]] = {
            function["name"]: function.get("parameters") or {}
            for function in functions
            if isinstance(function.get("name"), str)
        }
        self._sanitised = {re.sub(r"[^\w-]", "_", name): name for name in self._schemas}

    def __len__(self) -> int:
        return len(self._schemas)

    def name_of(self, call_id: str) -> str | None:
        """The function that a call's id names; None when it names none.

        The native form is ``functions.NAME:IDX``, where a name may hold dots, colons and hyphens itself.
        Others occur: no prefix, no number, everything joined by underscores, or an id that says nothing,
        which means the only tool when there is just one. A name that nobody declared is still a name.
        """
        text = call_id.strip()
        unnumbered = _INDEX.sub("", text)
        name = unnumbered.removeprefix(_PREFIX)
        for candidate in (name, unnumbered, text.removeprefix(_PREFIX), text):
            if candidate in self._schemas:
                return candidate
        if text.startswith("functions_"):
            joined = text.removeprefix("functions_")
            for candidate in (_NUMBER.sub("", joined), joined):
                if candidate in self._sanitised:
                    return self._sanitised[candidate]
        if _NAME.fullmatch(name) and not _OPAQUE.fullmatch(name):
            return name
        return next(iter(self._schemas)) if len(self._schemas) == 1 else None

    def infer(self, arguments: str) -> str | None:
        """The one tool that these arguments fit; None when there is none, or more than one."""
        try:
            value = read_json(arguments or "{}")
        except ValueError:
            return None
        if not isinstance(value, dict):
            return None
        fitting = [name for name, schema in self._schemas.items() if _fits(schema, value)]
        if len(fitting) > 1:  # a schema that does not know a key accepts it, but is hardly meant
            fitting = [name for name in fitting if value.keys() <= _properties(self._schemas[name]).keys()]
        return fitting[0] if len(fitting) == 1 else None


class ArgumentsText:
    """The arguments of one call as they come: passed on at once, and judged when they are over."""

    __slots__ = ("_texts",)

    def __init__(self) -> None:
        self._texts: list[str] = []

    @property
    def text(self) -> str:
        return "".join(self._texts)

    def push(self, text: str) -> str:
        """Take more; returns what is to be passed on: everything but white space at the beginning."""
        if not self._texts:
            text = text.lstrip()
        if text:
            self._texts.append(text)
        return text

    def problem(self) -> str | None:
        """What is wrong with them, in one sentence; None when they are a JSON object."""
        try:
            value = read_json(self.text)
        except ValueError as error:
            return f"the arguments are not JSON: {error}"
        return None if isinstance(value, dict) else "the arguments are not a JSON object"


def _properties(schema: Mapping[str, Any]) -> Mapping[str, Any]:
    properties = schema.get("properties")
    return properties if isinstance(properties, Mapping) else {}


def _fits(schema: Mapping[str, Any], arguments: Mapping[str, Any]) -> bool:
    """Whether arguments can be meant for a schema, as far as its first level says."""
    properties = _properties(schema)
    required = schema.get("required")
    if isinstance(required, list) and not all(name in arguments for name in required):
        return False
    if schema.get("additionalProperties") is False and not arguments.keys() <= properties.keys():
        return False
    return all(_has_type(properties.get(name), value) for name, value in arguments.items())


def _has_type(schema: Any, value: Any) -> bool:
    if not isinstance(schema, Mapping):
        return True
    if isinstance(schema.get("enum"), list) and value not in schema["enum"]:
        return False
    kinds = schema.get("type")
    if kinds is None:
        return True
    kinds = kinds if isinstance(kinds, list) else [kinds]
    if isinstance(value, bool):  # which is an int in Python, and no number in JSON
        return "boolean" in kinds
    return any(isinstance(value, _JSON_TYPES[kind]) for kind in kinds if kind in _JSON_TYPES)
