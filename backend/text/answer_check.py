"""A second look at answers that must meet a JSON schema, by another reading of the schema than the grammar's.

A mask keeps a model to its grammar; whether the grammar means what the schema says, only another reader can
tell. It looks at everything but regular expressions: patterns of strangers can take for ever in this one, and
the grammar has run them in bounded time.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from decimal import Decimal
from typing import Any, Final

import jsonschema
import referencing.exceptions
from jsonschema.protocols import Validator

from backend.text.json_schema import find_schema
from backend.text.json_text import read_json

Keyword = Callable[[Any, Any, Any, Any], Iterator[jsonschema.ValidationError] | None]

# Keywords that evaluate other schemas, and so can multiply the work.
_BRANCHING: Final = (
    "$ref", "$dynamicRef", "allOf", "anyOf", "oneOf", "properties", "additionalProperties", "items",
    "prefixItems", "dependentSchemas",
)  # fmt: skip
_UNREADABLE: Final = (
    jsonschema.SchemaError,
    jsonschema.exceptions.UndefinedTypeCheck,
    jsonschema.exceptions.UnknownType,
    referencing.exceptions.Unresolvable,
    ArithmeticError,  # multiples of what is infinite
    AttributeError,  # keywords whose values are of a wrong kind
    RecursionError,
    TypeError,
    ValueError,
)


class UnjudgedError(Exception):
    """The reader cannot tell; the message is one word why."""


class BrokenSchemaError(ValueError):
    """An answer does not meet its schema.

    Args:
        keyword: of the schema, that is not met; ``""`` when the answer is no JSON.
        place: where in the answer, as a JSON path.
    """

    def __init__(self, keyword: str, place: str) -> None:
        what = f"{keyword!r} of the schema is not met at {place}" if keyword else "the answer is no JSON"
        super().__init__(what)
        self.keyword = keyword
        self.place = place


def check_answer(schema: Any, text: str, *, max_steps: int) -> None:
    """Check that a text is JSON that meets a schema. Takes about 10 microseconds a step.

    Args:
        schema: one that a grammar could be made of.
        text: the whole answer.
        max_steps: schemas that may be evaluated, each time that one is.

    Raises:
        BrokenSchemaError: it does not.
        UnjudgedError: too many steps, or a schema that this reader does not understand.
    """
    try:
        value = read_json(text)
    except ValueError:
        raise BrokenSchemaError("", "$") from None
    try:
        error = next(_validator(schema, max_steps).iter_errors(value), None)
    except _UNREADABLE as problem:
        raise UnjudgedError(type(problem).__name__) from problem
    if error is not None:
        raise BrokenSchemaError(str(error.validator), error.json_path)


def _validator(schema: Any, max_steps: int) -> Validator:
    default = jsonschema.Draft202012Validator
    if find_schema(schema, lambda each: isinstance(each.get("items"), list)) is not None:
        default = jsonschema.Draft7Validator  # where such lists mean what the compiler takes them for
    kind = jsonschema.validators.validator_for(schema, default=default)
    left = iter(range(max_steps))

    def counted(keyword: Keyword) -> Keyword:
        def evaluate(validator: Any, value: Any, instance: Any, of: Any) -> Iterator[Any]:
            if next(left, None) is None:
                raise UnjudgedError("steps")
            yield from keyword(validator, value, instance, of) or ()

        return evaluate

    changed: dict[str, Keyword] = {
        name: counted(kind.VALIDATORS[name]) for name in _BRANCHING if name in kind.VALIDATORS
    }
    additional = changed["additionalProperties"]

    def without_patterns(validator: Any, value: Any, instance: Any, of: Any) -> Iterator[Any]:
        # Which properties are additional, patterns decide.
        if not (isinstance(of, Mapping) and of.get("patternProperties")):
            yield from additional(validator, value, instance, of) or ()

    changed |= {
        "pattern": _met,
        "patternProperties": _met,
        "unevaluatedProperties": _met,
        "additionalProperties": without_patterns,
        "multipleOf": _is_multiple,
    }
    checker: Validator = jsonschema.validators.extend(kind, changed)(schema)
    return checker


def _is_multiple(validator: Any, value: Any, instance: Any, of: Any) -> Iterator[jsonschema.ValidationError]:
    """As decimals, which is what both are written as: 65.41 is a multiple of 0.01."""
    is_number = validator.is_type(instance, "number")
    if is_number and Decimal(repr(instance)) % Decimal(repr(value)):
        yield jsonschema.ValidationError("is not a multiple")


def _met(validator: Any, value: Any, instance: Any, of: Any) -> None:
    return None
