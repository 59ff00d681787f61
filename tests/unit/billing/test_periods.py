from __future__ import annotations

from datetime import UTC, date, datetime

import pytest
from hypothesis import given
from hypothesis import strategies as st

from billing.periods import (
    MICROS_PER_DAY,
    day_start_us,
    day_text,
    instant_text,
    month_period,
    month_text,
    parse_date,
    parse_instant,
)

NOW_US = day_start_us(date(2026, 11, 30))


def test_a_month_is_half_open_and_utc() -> None:
    december = month_period("2026-12")
    assert december.start_us == day_start_us(date(2026, 12, 1))
    assert december.end_us == day_start_us(date(2027, 1, 1))
    assert month_period("2026-11").end_us == december.start_us


@pytest.mark.parametrize("text", ["2026-13", "2026-00", "26-01", "2026-1", "2026-01-01", "0001-01", ""])
def test_anything_but_a_month_is_refused(text: str) -> None:
    with pytest.raises(ValueError, match="is not a month"):
        month_period(text)


@pytest.mark.parametrize("text", ["2026-02-29", "2026-1-1", "20260101", "yesterday", "2026-01-01T00:00"])
def test_anything_but_a_date_is_refused(text: str) -> None:
    with pytest.raises(ValueError, match="is not a date"):
        parse_date(text)


@given(day=st.dates(date(1970, 1, 1), date(9998, 12, 31)))
def test_midnight_begins_the_day(day: date) -> None:
    start = day_start_us(day)
    assert datetime.fromtimestamp(start // 1_000_000, UTC) == datetime(
        day.year, day.month, day.day, tzinfo=UTC
    )
    assert day_text(start // MICROS_PER_DAY) == day.isoformat()
    assert day_text((start + MICROS_PER_DAY - 1) // MICROS_PER_DAY) == day.isoformat()
    assert month_text(start) == day.isoformat()[:7]


@pytest.mark.parametrize(
    ("text", "instant"),
    [
        ("2026-11-30", "2026-11-30T00:00:00.000000Z"),
        ("2026-11-30T09:30:00Z", "2026-11-30T09:30:00.000000Z"),
        ("2026-11-30T09:30:00", "2026-11-30T09:30:00.000000Z"),
        ("2026-11-30T09:30:00+09:00", "2026-11-30T00:30:00.000000Z"),
        ("24h", "2026-11-29T00:00:00.000000Z"),
        ("90s", "2026-11-29T23:58:30.000000Z"),
        ("2w", "2026-11-16T00:00:00.000000Z"),
    ],
)
def test_instants_are_read_as_people_write_them(text: str, instant: str) -> None:
    assert instant_text(parse_instant(text, NOW_US)) == instant


@pytest.mark.parametrize("text", ["", "soon", "24", "h", "-1h", "2026-11-31", "30.11.2026"])
def test_other_instants_are_refused(text: str) -> None:
    with pytest.raises(ValueError, match=r"neither a date|is not a date"):
        parse_instant(text, NOW_US)
