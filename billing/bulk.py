"""Inserting many rows at little cost.

Rows go to the driver as positions, not names, and many to a statement. That halves the work per row, and the
driver hands the interpreter lock over once per statement instead of once per row, which an event loop in the
same process feels.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from functools import lru_cache
from itertools import chain
from typing import Any

from sqlalchemy import Connection, Engine, Table
from sqlalchemy.sql.dml import Insert

ROWS_PER_STATEMENT = 64

_VALUES = re.compile(r"(INSERT INTO .* VALUES )(\([^()]*\))( ON CONFLICT .*)", re.DOTALL)

Row = tuple[str | int | bool, ...]


Build = Callable[[Table], Insert]


class BulkInsert:
    """Inserts rows into one table; the statement says what becomes of rows whose key exists. Immutable,
    thread-safe.
    """

    def __init__(self, engine: Engine, table: Table, build: Build) -> None:
        """``build``: the dialect's way to insert, which writes the same for every engine of the dialect."""
        columns = [column.name for column in table.columns]
        kind: Any = type(engine.dialect)
        self._head, self._values, self._tail = _parts(build, table, kind, engine.dialect.paramstyle)
        self._one = self._statement(1)
        self._many = self._statement(ROWS_PER_STATEMENT)
        self._key = columns[0]

    def execute(self, connection: Connection, rows: Sequence[Row]) -> int:
        """Insert within the connection's transaction; returns how many rows were new (or changed)."""
        num_inserted = 0
        start = 0
        while len(rows) - start >= ROWS_PER_STATEMENT:
            end = start + ROWS_PER_STATEMENT
            flat = tuple(chain.from_iterable(rows[start:end]))
            num_inserted += connection.exec_driver_sql(self._many, flat).rowcount
            start = end
        if start < len(rows):
            num_inserted += connection.exec_driver_sql(self._one, list(rows[start:])).rowcount
        return num_inserted

    def execute_new(self, connection: Connection, rows: Sequence[Row]) -> set[str]:
        """As :meth:`execute`, and returns the first column of the rows that were new."""
        new: set[str] = set()
        for start in range(0, len(rows), ROWS_PER_STATEMENT):
            some = rows[start : start + ROWS_PER_STATEMENT]
            statement = self._many if len(some) == ROWS_PER_STATEMENT else self._statement(len(some))
            flat = tuple(chain.from_iterable(some))
            returning = f"{statement} RETURNING {self._key}"
            new.update(row[0] for row in connection.exec_driver_sql(returning, flat))
        return new

    def _statement(self, num_rows: int) -> str:
        return self._head + ", ".join([self._values] * num_rows) + self._tail


@lru_cache(maxsize=64)
def _parts(build: Build, table: Table, kind: Any, paramstyle: str) -> tuple[str, str, str]:
    """What stands before the values, the values of a row, what stands behind. Compiling takes milliseconds,
    and there are eight such statements to a store.
    """
    compiled = build(table).compile(dialect=kind(paramstyle=paramstyle))
    columns = [column.name for column in table.columns]
    assert compiled.positiontup == columns, "rows are tuples in the order of the table's columns"
    parts = _VALUES.fullmatch(str(compiled))
    assert parts is not None, f"an insert of an unforeseen form: {compiled}"
    return parts[1], parts[2], parts[3]
