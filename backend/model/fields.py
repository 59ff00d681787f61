"""Typed reading of a decoded JSON object, with errors that name the file and the field."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from math import inf, isfinite
from typing import Any

from backend.model.errors import ModelLoadError, UnsupportedModelError


@dataclass(frozen=True, slots=True)
class Fields:
    """One JSON object of a file; ``path`` is where it stands in it, with a dot after each name.

    A ``default`` of None means that the field is required.
    """

    raw: Mapping[str, Any]
    source: str
    path: str = ""

    def error(self, field: str, problem: str) -> ModelLoadError:
        return ModelLoadError(f"{self.source}: {self.path}{field}: {problem}")

    def unsupported(self, field: str, problem: str) -> UnsupportedModelError:
        return UnsupportedModelError(f"{self.source}: {self.path}{field}: {problem}")

    def section(self, field: str) -> Fields:
        value = self.raw.get(field) or {}
        if not isinstance(value, Mapping):
            raise self.error(field, "must be an object")
        return Fields(value, self.source, f"{self.path}{field}.")

    def size(self, field: str, *, default: int | None = None, minimum: int = 1) -> int:
        value = self._take(field, default)
        if isinstance(value, bool) or not isinstance(value, int) or value < minimum:
            raise self.error(field, f"{value!r} must be an integer of at least {minimum}")
        return value

    def number(self, field: str, *, default: float | None = None, minimum: float = -inf) -> float:
        value = self._take(field, default)
        if isinstance(value, bool) or not isinstance(value, int | float) or not isfinite(value):
            raise self.error(field, f"{value!r} must be a number")
        if value < minimum:
            raise self.error(field, f"{value!r} must be at least {minimum:g}")
        return float(value)

    def token_ids(self, field: str) -> tuple[int, ...]:
        """One id, several, or none."""
        value = self.raw.get(field)
        ids = [] if value is None else value if isinstance(value, list) else [value]
        for each in ids:
            if isinstance(each, bool) or not isinstance(each, int) or each < 0:
                raise self.error(field, f"{each!r} is not the id of a token")
        return tuple(ids)

    def flag(self, field: str, *, default: bool) -> bool:
        value = self._take(field, default)
        if not isinstance(value, bool):
            raise self.error(field, f"{value!r} must be true or false")
        return value

    def text(self, field: str) -> str:
        value = self._take(field, None)
        if not isinstance(value, str):
            raise self.error(field, f"{value!r} must be a string")
        return value

    def expect(self, field: str, honoured: object, *, default: object) -> None:
        """Refuse a field that asks for anything but the one value that this engine honours."""
        value = self.raw.get(field, default)
        if value is None and default is not None:
            value = default
        if value != honoured:
            raise self.unsupported(field, f"{value!r} is not supported, only {honoured!r}")

    def _take(self, field: str, default: object) -> Any:
        value = self.raw.get(field)
        if value is not None:
            return value
        if default is None:
            raise self.error(field, "missing")
        return default
