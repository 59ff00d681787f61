"""Instants as people write and read them; all of them UTC."""

from __future__ import annotations

import time
from typing import Any

import click

from billing.periods import instant_text, parse_instant


def now_us() -> int:
    """UTC microseconds."""
    return time.time_ns() // 1_000


def show_instant(at_us: int) -> str:
    """UTC microseconds as ``2026-11-30 19:30:00``."""
    return instant_text(at_us)[:19].replace("T", " ")


class Instant(click.ParamType[int]):
    """An instant as UTC microseconds: ``2026-11-30``, ``2026-11-30T19:30:00Z``, or ``24h`` ago."""

    name = "instant"

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> int:
        try:
            return parse_instant(str(value), now_us())
        except ValueError as error:
            self.fail(str(error), param, ctx)
