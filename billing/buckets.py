"""Times in buckets, inside queries."""

from __future__ import annotations

from typing import Any

from sqlalchemy import ColumnElement, literal_column


def bucket_start(column: ColumnElement[Any], width_us: int) -> ColumnElement[int]:
    """When the bucket began that a time of ``column`` is in, in microseconds.

    The width is part of the statement, not a parameter: PostgreSQL takes two parameters for two different
    expressions, and does not let a query select one and group by the other.
    """
    return column - column % literal_column(str(int(width_us)))


def bucket_number(column: ColumnElement[Any], width_us: int) -> ColumnElement[int]:
    """How many whole buckets lie between 1970 and a time of ``column``."""
    return column // literal_column(str(int(width_us)))
