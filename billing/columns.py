"""The kinds of columns that the store's tables are made of; none but an :func:`instant` is ever null."""

from __future__ import annotations

from sqlalchemy import BigInteger, Column, Text


def text(name: str, *, is_key: bool = False, default: str | None = None) -> Column[str]:
    return Column(name, Text, primary_key=is_key, nullable=False, server_default=default)


def number(name: str, *, is_key: bool = False, default: str | None = None) -> Column[int]:
    """64 bits; never counted up by the database."""
    return Column(
        name, BigInteger, primary_key=is_key, nullable=False, autoincrement=False, server_default=default
    )


def instant(name: str) -> Column[int | None]:
    """UTC microseconds of something that may not have happened."""
    return Column(name, BigInteger, nullable=True)
