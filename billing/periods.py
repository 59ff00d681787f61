"""Instants and windows. All are integer microseconds, UTC; every window is half-open, ``[start, end)``.

A request at exactly 00:00:00 belongs to the day that begins. No local time zone is ever read.
"""

from __future__ import annotations

import re
from datetime import UTC, date, datetime, timedelta

import msgspec

MICROS_PER_SECOND = 1_000_000
MICROS_PER_DAY = 86_400 * MICROS_PER_SECOND

_EPOCH = datetime(1970, 1, 1, tzinfo=UTC)
_EPOCH_DAY = _EPOCH.date()
_DATE = re.compile(r"\d{4}-\d{2}-\d{2}", re.ASCII)
_MONTH = re.compile(r"(\d{4})-(\d{2})", re.ASCII)
_AGO = re.compile(r"(\d{1,6})([smhdw])", re.ASCII)
_SECONDS = {"s": 1, "m": 60, "h": 3_600, "d": 86_400, "w": 604_800}


class Period(msgspec.Struct, frozen=True):
    """``[start_us, end_us)``; None leaves a side open."""

    start_us: int | None = None
    end_us: int | None = None


def parse_date(text: str) -> date:
    """A date of the form YYYY-MM-DD. Raises ValueError."""
    if _DATE.fullmatch(text) is None:
        raise ValueError(f"{text!r} is not a date of the form YYYY-MM-DD")
    try:
        return date.fromisoformat(text)
    except ValueError as error:
        raise ValueError(f"{text!r} is not a date: {error}") from None


def day_start_us(day: date) -> int:
    """00:00:00 UTC of ``day``."""
    return (day - _EPOCH_DAY).days * MICROS_PER_DAY


def day_text(day_number: int) -> str:
    """The date of ``instant_us // MICROS_PER_DAY``."""
    return (_EPOCH_DAY + timedelta(days=day_number)).isoformat()


def instant_text(instant_us: int) -> str:
    """ISO 8601 with microseconds and a Z."""
    return (
        (_EPOCH + timedelta(microseconds=instant_us))
        .isoformat(timespec="microseconds")
        .replace("+00:00", "Z")
    )


def month_period(text: str) -> Period:
    """The whole month ``YYYY-MM``. Raises ValueError."""
    match = _MONTH.fullmatch(text)
    if match is None or not 1 <= int(match.group(2)) <= 12 or int(match.group(1)) < 1970:
        raise ValueError(f"{text!r} is not a month of the form YYYY-MM")
    year, month = int(match.group(1)), int(match.group(2))
    following = (year + 1, 1) if month == 12 else (year, month + 1)
    return Period(day_start_us(date(year, month, 1)), day_start_us(date(*following, 1)))


def month_text(instant_us: int) -> str:
    """The month ``YYYY-MM`` that ``instant_us`` falls in."""
    return instant_text(instant_us)[:7]


def parse_instant(text: str, now_us: int) -> int:
    """``2026-11-30``, an ISO 8601 time (UTC unless it says otherwise), or ``90s 15m 24h 7d 2w`` before now.

    Raises:
        ValueError: anything else.
    """
    ago = _AGO.fullmatch(text)
    if ago is not None:
        return now_us - int(ago.group(1)) * _SECONDS[ago.group(2)] * MICROS_PER_SECOND
    if _DATE.fullmatch(text) is not None:
        return day_start_us(parse_date(text))
    try:
        instant = datetime.fromisoformat(text)
    except ValueError:
        raise ValueError(
            f"{text!r} is neither a date (2026-11-30), a time (2026-11-30T12:00:00Z) nor an age (24h, 7d)"
        ) from None
    aware = instant.replace(tzinfo=UTC) if instant.tzinfo is None else instant
    return (aware - _EPOCH) // timedelta(microseconds=1)
