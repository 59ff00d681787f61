"""What must be known of a JSON schema before a grammar is made of it.

A grammar compiler trusts its input: a reference that leads back to itself gives a grammar in which no answer
ever ends. Such schemas are found here, and named by the place where they go wrong.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from copy import deepcopy
from typing import Any, Final
from urllib.parse import unquote, urldefrag, urljoin

MAX_DEPTH: Final = 64
"""Arrays and objects inside each other, beyond which no schema is read: deeper ones are attacks."""

_ONE_SCHEMA: Final = (
    "not", "if", "then", "else", "items", "additionalItems", "additionalProperties", "contains",
    "propertyNames", "unevaluatedItems", "unevaluatedProperties", "contentSchema",
)  # fmt: skip
_LISTS_OF_SCHEMAS: Final = ("allOf", "anyOf", "oneOf", "prefixItems", "items")
_MAPS_OF_SCHEMAS: Final = (
    "properties", "patternProperties", "dependentSchemas", "$defs", "definitions", "dependencies",
)  # fmt: skip

STANDARD_FORMATS: Final = frozenset({
    "date-time", "date", "time", "duration", "email", "idn-email", "hostname", "idn-hostname", "ipv4", "ipv6",
    "uri", "uri-reference", "iri", "iri-reference", "uuid", "uri-template", "json-pointer",
    "relative-json-pointer", "regex",
})  # fmt: skip
"""The values of ``format`` that JSON Schema 2020-12 defines; any other is an annotation to it."""

# A schema whose references need more rounds than this to be judged was made to be hard.
_MAX_ROUNDS: Final = 64

Path = tuple[str | int, ...]


class SchemaError(ValueError):
    """A schema that cannot be used.

    Args:
        path: where in the schema, as keys and places in lists.
        problem: what is wrong there, in words that can follow a colon.
    """

    def __init__(self, path: Path, problem: str) -> None:
        super().__init__(problem)
        self.path = path
        self.problem = problem


def check_schema(schema: Any) -> None:
    """Check that a schema is one, can be read with bounded effort, and has an answer that ends.

    Raises:
        SchemaError: naming the place.
    """
    _check_depth(schema)
    if not isinstance(schema, Mapping | bool):
        raise SchemaError((), "must be a JSON schema: an object or a boolean")
    _check_counts(schema)
    _Endings(schema).check()


def walk_schemas(schema: Any) -> Iterator[tuple[Path, Mapping[str, Any]]]:
    """Every schema inside a schema, itself first, with its place."""
    waiting: list[tuple[Path, Any]] = [((), schema)]
    while waiting:
        path, each = waiting.pop()
        if not isinstance(each, Mapping):
            continue
        yield path, each
        waiting += reversed(list(_children(path, each)))


def find_schema(schema: Any, is_it: Callable[[Mapping[str, Any]], bool]) -> Path | None:
    """The place of the first schema inside a schema that fits."""
    return next((path for path, each in walk_schemas(schema) if is_it(each)), None)


def _children(path: Path, schema: Mapping[str, Any]) -> Iterator[tuple[Path, Any]]:
    for key in _ONE_SCHEMA:
        if isinstance(schema.get(key), Mapping):
            yield (*path, key), schema[key]
    for key in _LISTS_OF_SCHEMAS:
        if isinstance(schema.get(key), list):
            for index, each in enumerate(schema[key]):
                yield (*path, key, index), each
    for key in _MAPS_OF_SCHEMAS:
        if isinstance(schema.get(key), Mapping):
            for name, each in schema[key].items():
                yield (*path, key, name), each


def _check_depth(schema: Any) -> None:
    waiting: list[tuple[Path, Any]] = [((), schema)]
    while waiting:
        path, value = waiting.pop()
        if len(path) > MAX_DEPTH:
            raise SchemaError(path[:8], f"is nested more than {MAX_DEPTH} levels deep")
        if isinstance(value, Mapping):
            waiting += [((*path, key), each) for key, each in value.items()]
        elif isinstance(value, list):
            waiting += [((*path, index), each) for index, each in enumerate(value)]


def _check_counts(schema: Any) -> None:
    """Grammars count members of an object, and cannot tell that two have one name. So a least number is met
    for certain only where names are required, or where it is one.
    """

    def counts_names(each: Mapping[str, Any]) -> bool:
        least = each.get("minProperties")
        if not isinstance(least, int | float) or "enum" in each or "const" in each:
            return False
        return least > max(1, len({name for name in _list(each, "required") if isinstance(name, str)}))

    path = find_schema(schema, counts_names)
    if path is not None:
        raise SchemaError(
            (*path, "minProperties"), "is not supported above the number of required properties (or 1)"
        )


def without_annotations(schema: Any) -> Any:
    """A schema without what binds nothing and is in a compiler's way; what is given stays as it was.

    Values of ``format`` that no specification defines are annotations; those that JSON Schema defines stay,
    whether a compiler knows them or not. An ``$id`` with a fragment is a name of older drafts, and goes when
    every reference is a pointer.
    """
    if find_schema(schema, lambda each: _has_own_format(each) or _has_fragment_id(each)) is None:
        return schema
    changed = deepcopy(schema)
    has_names = find_schema(changed, _refers_by_name) is not None
    for _, each in walk_schemas(changed):
        if _has_own_format(each):
            del each["format"]  # type: ignore[attr-defined]  # a copy, of plain JSON
        if _has_fragment_id(each) and not has_names:
            del each["$id"]  # type: ignore[attr-defined]
    return changed


def _refers_by_name(schema: Mapping[str, Any]) -> bool:
    value = schema.get("$ref")
    return isinstance(value, str) and value != "#" and not value.startswith("#/")


def _has_own_format(schema: Mapping[str, Any]) -> bool:
    value = schema.get("format")
    return isinstance(value, str) and value not in STANDARD_FORMATS


def _has_fragment_id(schema: Mapping[str, Any]) -> bool:
    value = schema.get("$id")
    return isinstance(value, str) and bool(value.partition("#")[2])


class _Endings:
    """Finds out which of the schemas inside a schema have an instance that ends, as the least fixed point.

    None is one until it is proved: what is being looked at counts as not proved, and whatever that made fail
    is looked at again as long as something new was proved. All must be, for an answer that has entered one
    that is not can neither go on nor end.
    """

    def __init__(self, root: Any) -> None:
        self._root = root
        self._bases, self._names = _resolve_names(root)
        self._proved: set[int] = set()
        self._open: set[int] = set()
        self._failed: set[int] = set()

    def check(self) -> None:
        try:
            self._look()
        except RecursionError:
            raise SchemaError((), "has references that lead to each other in a chain too long") from None
        # What fails without a reference is impossible rather than endless: the compiler sees to that.
        path = find_schema(self._root, lambda each: "$ref" in each and id(each) not in self._proved)
        if path is not None:
            raise SchemaError((*path, "$ref"), "leads back to itself: no value that ends could meet it")

    def _look(self) -> None:
        every = [schema for _, schema in walk_schemas(self._root)]
        num_proved = -1
        for _ in range(_MAX_ROUNDS):
            if num_proved == len(self._proved):
                return
            num_proved = len(self._proved)
            self._failed.clear()
            for schema in every:
                self._ends(schema)
        raise SchemaError((), "has references too entangled to be judged")

    def _ends(self, schema: Any) -> bool:
        if not isinstance(schema, Mapping):
            return schema is not False
        key = id(schema)
        if key in self._proved:
            return True
        if key in self._open or key in self._failed:
            return False
        self._open.add(key)
        ends = self._prove(schema)
        self._open.discard(key)
        (self._proved if ends else self._failed).add(key)
        return ends

    def _prove(self, schema: Mapping[str, Any]) -> bool:
        reference = schema.get("$ref")
        if isinstance(reference, str) and not self._ends(self._target(schema, reference)):
            return False
        if not all(self._ends(each) for each in _list(schema, "allOf")):
            return False
        for key in ("anyOf", "oneOf"):
            choices = _list(schema, key)
            # Every choice is looked at, so that each reference among them is proved or not.
            proved = [self._ends(each) for each in choices]
            if choices and not any(proved):
                return False
        if "enum" in schema or "const" in schema:
            return True
        kinds = schema.get("type")
        kinds = [kinds] if isinstance(kinds, str) else kinds if isinstance(kinds, list) else []
        if not kinds and ("properties" in schema or "required" in schema):
            kinds = ["object"]
        proved = [self._kind_ends(kind, schema) for kind in kinds]
        return not kinds or any(proved)

    def _kind_ends(self, kind: Any, schema: Mapping[str, Any]) -> bool:
        if kind == "object":
            required = [name for name in _list(schema, "required") if isinstance(name, str)]
            properties = schema.get("properties")
            properties = properties if isinstance(properties, Mapping) else {}
            rest = schema.get("additionalProperties", True)
            needed = [properties.get(name, rest) for name in required]
            least = schema.get("minProperties")
            if isinstance(least, int) and least > len(required):
                patterns = schema.get("patternProperties")
                patterns = list(patterns.values()) if isinstance(patterns, Mapping) else []
                proved = [self._ends(each) for each in (*properties.values(), *patterns, rest)]
                if not any(proved):
                    return False
            return all(self._ends(each) for each in needed)
        if kind == "array":
            least = schema.get("minItems")
            if not isinstance(least, int) or least < 1:
                return True
            first = _list(schema, "prefixItems") or _list(schema, "items")
            items = schema.get("items", True)
            rest = True if isinstance(items, list) else items
            needed = [*first[:least], *([rest] if least > len(first) else [])]
            return all(self._ends(each) for each in needed)
        return True

    def _target(self, schema: Mapping[str, Any], reference: str) -> Any:
        """What a reference within the schema leads to; True for one that the compiler must judge."""
        resource, fragment = urldefrag(urljoin(self._bases[id(schema)], reference))
        if fragment and not fragment.startswith("/"):
            return self._names.get((resource, unquote(fragment)), True)
        value = self._names.get((resource, ""), True)
        for step in unquote(fragment).split("/")[1:]:
            step = step.replace("~1", "/").replace("~0", "~")
            if isinstance(value, Mapping) and step in value:
                value = value[step]
            elif isinstance(value, list) and step.isdigit() and int(step) < len(value):
                value = value[int(step)]
            else:
                return True
        return value


def _resolve_names(root: Any) -> tuple[dict[int, str], dict[tuple[str, str], Any]]:
    """The base URI of each schema (by identity), and every schema that has a name: the URI of its resource
    and its anchor, "" for a resource itself (JSON Schema 2020-12, section 8.2).
    """
    bases: dict[int, str] = {}
    by_path: dict[Path, str] = {(): ""}
    names: dict[tuple[str, str], Any] = {("", ""): root}
    for path, schema in walk_schemas(root):
        above = path
        while above not in by_path:
            above = above[:-1]
        base = by_path[above]
        said = schema.get("$id")
        if isinstance(said, str):
            resource, fragment = urldefrag(urljoin(base, said))
            names[resource, fragment] = schema
            if not fragment:
                base = resource
        by_path[path] = base
        bases[id(schema)] = base
        anchor = schema.get("$anchor")
        if isinstance(anchor, str):
            names[base, anchor] = schema
    return bases, names


def _list(schema: Mapping[str, Any], key: str) -> list[Any]:
    value = schema.get(key)
    return value if isinstance(value, list) else []
