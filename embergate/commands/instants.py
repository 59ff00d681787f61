"""Instants as people write and read them; all of them UTC."""

from __future__ import annotations

from datetime import UTC, datetime, timedelta
from typing import Any

import click

_UNITS = {"s": "seconds", "m": "minutes", "h": "hours", "d": "days", "w": "weeks"}


def show_instant(at_us: int) -> str:
    """UTC microseconds as ``2026-11-30 19:30:00``."""
    return f"{datetime.fromtimestamp(at_us / 1_000_000, UTC):%Y-%m-%d %H:%M:%S}"


class Instant(click.ParamType[int]):
    """An instant as UTC microseconds: ``2026-11-30``, ``2026-11-30T19:30:00Z``, or ``24h`` ago."""

    name = "instant"

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> int:
        text = str(value)
        if text[:-1].isdigit() and text[-1] in _UNITS:
            ago = timedelta(**{_UNITS[text[-1]]: int(text[:-1])})
            return _to_us(datetime.now(UTC) - ago)
        try:
            instant = datetime.fromisoformat(text)
        except ValueError:
            self.fail(f"{text} is neither a date such as 2026-11-30 nor a span such as 24h", param, ctx)
        return _to_us(instant if instant.tzinfo else instant.replace(tzinfo=UTC))


def _to_us(instant: datetime) -> int:
    return (instant - datetime(1970, 1, 1, tzinfo=UTC)) // timedelta(microseconds=1)
