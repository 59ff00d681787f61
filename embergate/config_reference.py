"""Writes ``docs/config.md``: each key's type and default from the code, its meaning from ``config.yaml``.

``make docs`` runs ``python -m embergate.config_reference config.yaml docs/config.md``; the tests check that
the page is fresh and that every key has its comment.
"""

from __future__ import annotations

import re
import sys
import types
import typing
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import msgspec

from embergate.config import Config

_KEY = re.compile(r"^(?P<indent> *)(?P<dash>- )?(?P<key>[a-z_]+):")

_EXAMPLE = re.compile(r"^( *)#(?=  )")

_HEAD = """# Configuration

<!-- Written by `make docs` from config.yaml and the code; edit those. -->

`config.yaml` is the one configuration. It is found by `--config`, `EMBERGATE_CONFIG`, or in the current
directory. Unknown and duplicate keys, wrong types and impossible values are refused with the path of the key,
as in `gateway.prot: unknown key; did you mean port?`. A key that is missing takes its default.

Environment: `EMBERGATE_CONFIG` names another file, `EMBERGATE_DATA_DIR` overrides `data_dir`,
`EMBERGATE_MODEL` overrides `replicas.model` (`make up MODEL=kimi-k2.5-tiny` sets it).

| key | type | default | meaning |
|---|---|---|---|
"""


class Setting(msgspec.Struct, frozen=True):
    """One key: its path such as ``models[].id``, its type and default in words."""

    path: str
    type: str
    default: str


def list_settings(section: type[msgspec.Struct] = Config, path: str = "") -> Iterator[Setting]:
    """Every key of the configuration, in the order of declaration."""
    for field in msgspec.structs.fields(section):
        inner = f"{path}.{field.encode_name}" if path else field.encode_name
        nested, suffix = _section_in(field.type)
        if nested is None or suffix:
            yield Setting(inner, _type_words(field.type), _default_words(field))
        if nested is not None and suffix != "{}":
            yield from list_settings(nested, inner + suffix)


def read_comments(text: str) -> dict[str, str]:
    """Path -> comment above the key, of a block-style YAML file.

    A comment whose ``#`` is followed by two spaces is an example, read as if the ``#`` were not there.
    """
    comments: dict[str, str] = {}
    parents: list[tuple[int, str]] = []
    pending: list[str] = []
    for raw in text.splitlines():
        line = _EXAMPLE.sub(r"\1 ", raw)
        if line.strip().startswith("#"):
            pending.append(line.strip().lstrip("#").strip())
        elif match := _KEY.match(line):
            indent = len(match["indent"])
            while parents and parents[-1][0] >= indent + bool(match["dash"]):
                parents.pop()
            parent = parents[-1][1] if parents else ""
            if match["dash"]:
                parent += "[]"
                parents.append((indent + 1, parent))
                indent += 2
            path = f"{parent}.{match['key']}" if parent else match["key"]
            parents.append((indent, path))
            comments.setdefault(path, " ".join(pending))
            pending = []
        else:
            pending = []
    return comments


def render(text: str) -> str:
    """The page, given the text of ``config.yaml``."""
    comments = read_comments(text)
    rows = [
        f"| `{setting.path}` | {setting.type} | {setting.default} | {_cell(comments.get(setting.path, ''))} |"
        for setting in list_settings()
    ]
    return _HEAD + "\n".join(rows) + "\n"


def _section_in(annotation: Any) -> tuple[type[msgspec.Struct] | None, str]:
    """The section that a key holds, and how: ``[]`` a list of them, ``{}`` a mapping to them."""
    if isinstance(annotation, type) and issubclass(annotation, msgspec.Struct):
        return annotation, ""
    arguments = typing.get_args(annotation)
    suffix = {list: "[]", dict: "{}"}.get(typing.get_origin(annotation), "")
    if suffix and isinstance(arguments[-1], type) and issubclass(arguments[-1], msgspec.Struct):
        return arguments[-1], suffix
    return None, ""


def _type_words(annotation: Any) -> str:
    origin, arguments = typing.get_origin(annotation), typing.get_args(annotation)
    if origin is typing.Annotated:
        return _type_words(arguments[0])
    if origin is typing.Literal:
        return ", ".join(f"`{choice}`" for choice in arguments)
    if origin in (types.UnionType, typing.Union):
        return " or ".join(_type_words(argument) for argument in arguments)
    if origin is list:
        return f"list of {_type_words(arguments[0])}"
    if origin is dict:
        return f"mapping to {_type_words(arguments[1])}"
    if annotation is type(None):
        return "null"
    if isinstance(annotation, type) and issubclass(annotation, msgspec.Struct):
        return "sections"
    return {str: "text", int: "integer", float: "number", bool: "true or false"}.get(
        annotation, str(annotation)
    )


def _default_words(field: msgspec.structs.FieldInfo) -> str:
    default = field.default
    if default is msgspec.NODEFAULT and field.default_factory is not msgspec.NODEFAULT:
        default = field.default_factory()
    if default is msgspec.NODEFAULT:
        return "required"
    if default is None:
        return "null"
    if default in ("", [], {}):
        return "empty"
    return f"`{str(default).lower() if isinstance(default, bool) else default}`"


def _cell(text: str) -> str:
    return text.replace("|", "\\|")


def main(arguments: list[str]) -> None:
    """Write the page named second from the file named first."""
    source, page = map(Path, arguments)
    page.write_text(render(source.read_text()))


if __name__ == "__main__":
    main(sys.argv[1:])
