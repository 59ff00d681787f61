"""Questions about usage, answered from the sums: filtered, grouped, ordered, a page at a time.

A time bucket of the sums is a quarter-hour, an hour with sessions, or a day. A period that ends within a
bucket is widened to it, and an answer says what it covers. Only a question about single requests' size
(``min_neurons_e4``, ``min_prompt_tokens``) has to read the records themselves.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Literal, get_args

import msgspec
from sqlalchemy import (
    ColumnElement,
    Connection,
    FromClause,
    Row,
    Select,
    Subquery,
    and_,
    case,
    func,
    literal,
    or_,
    select,
)

from billing import schema
from billing.buckets import bucket_start
from billing.latency import LatencySummary, summarize
from billing.money import format_nanos
from billing.periods import MICROS_PER_DAY, Period, instant_text
from billing.rollups import MICROS_PER_HOUR, MICROS_PER_QUARTER, SUMS

Dimension = Literal["quarter", "hour", "day", "account", "model", "token", "session", "surface", "status"]
DIMENSIONS: tuple[Dimension, ...] = get_args(Dimension)
WIDTHS_US: dict[Dimension, int] = {
    "quarter": MICROS_PER_QUARTER,
    "hour": MICROS_PER_HOUR,
    "day": MICROS_PER_DAY,
}
_COLUMNS: dict[Dimension, str] = {
    "account": "account_id",
    "model": "model",
    "token": "token_id",
    "session": "session",
    "surface": "surface",
    "status": "status",
}
_WITH_LATENCY = frozenset({"quarter", "hour", "day", "account", "model", "token"})

Keyset = tuple[str | int, ...]


class UsageFilter(msgspec.Struct, frozen=True, kw_only=True):
    """Which usage is meant; what is empty or None is not restricted.

    ``min_neurons_e4``: only requests of at least so many ten-thousandths of a neuron; ``min_prompt_tokens``:
    of at least so many prompt tokens.
    """

    account_id: str | None = None
    period: Period = Period()
    models: tuple[str, ...] = ()
    token_ids: tuple[str, ...] = ()
    sessions: tuple[str, ...] = ()
    surfaces: tuple[str, ...] = ()
    statuses: tuple[str, ...] = ()
    min_neurons_e4: int = 0
    min_prompt_tokens: int = 0

    @property
    def is_about_single_requests(self) -> bool:
        """Whether the sums cannot tell."""
        return self.min_neurons_e4 > 0 or self.min_prompt_tokens > 0


class Order(msgspec.Struct, frozen=True):
    """By a dimension of the grouping or one of ``billing.rollups.SUMS``; ties by the dimensions."""

    by: str
    is_descending: bool = False


class UsageGroup(msgspec.Struct, frozen=True, kw_only=True):
    """Sums over one group. ``dimensions`` names it: instants (of its start) in microseconds, else text.

    Tokens count all requests, amounts only those that are charged; ``*_nanos`` of token classes add up to
    ``amount_nanos``. ``duration_us`` is the time that all requests took together.
    """

    dimensions: dict[Dimension, str | int]
    num_requests: int
    num_estimated: int
    prompt_tokens: int
    cached_prompt_tokens: int
    completion_tokens: int
    reasoning_tokens: int
    input_nanos: int
    cached_input_nanos: int
    output_nanos: int
    amount_nanos: int
    undiscounted_nanos: int
    neurons_e4: int
    duration_us: int

    @property
    def cached_share(self) -> float:
        """Cached over all prompt tokens; 0 when there are none."""
        return self.cached_prompt_tokens / self.prompt_tokens if self.prompt_tokens else 0.0

    @property
    def discount_nanos(self) -> int:
        """What caching saved."""
        return self.undiscounted_nanos - self.amount_nanos

    def as_json(self) -> dict[str, Any]:
        """Dimensions and sums side by side, money also as decimal strings."""
        fields = {name: getattr(self, name) for name in SUMS if name not in ("neurons_e4", "duration_us")}
        return {
            **{name: shown(name, value) for name, value in self.dimensions.items()},
            **fields,
            "cached_share": self.cached_share,
            "discount_nanos": self.discount_nanos,
            "amount": format_nanos(self.amount_nanos),
            "undiscounted": format_nanos(self.undiscounted_nanos),
            "discount": format_nanos(self.discount_nanos),
            "neurons": self.neurons_e4 / 10_000,
            "duration_ms": self.duration_us / 1_000,
        }


class GroupPage(msgspec.Struct, frozen=True, kw_only=True):
    """``next_after`` continues behind the last row, None at the end. ``period`` is what is covered."""

    rows: list[UsageGroup]
    next_after: Keyset | None
    period: Period


def shown(dimension: str, value: str | int) -> str:
    """A dimension's value as people read it: a date, a time, or the text itself."""
    if dimension == "day":
        return instant_text(int(value))[:10]
    return instant_text(int(value))[:19] + "Z" if dimension in WIDTHS_US else str(value)


def usage_groups(
    connection: Connection,
    wanted: UsageFilter,
    by: Sequence[Dimension] = (),
    *,
    order: Sequence[Order] = (),
    limit: int = 100,
    after: Keyset | None = None,
) -> GroupPage:
    """Sums per combination of ``by``; without any, one row over everything.

    Raises:
        ValueError: the grouping cannot be answered (quarter-hours of sessions), or ``after`` is of another.
    """
    source, width_us = _source(wanted, by)
    period = _widened(wanted.period, width_us)
    columns = source.c
    keys = [_key(columns, dimension).label(dimension) for dimension in by]
    grouped = (
        select(*keys, *(func.coalesce(func.sum(columns[name]), 0).label(name) for name in SUMS))
        .where(*_conditions(columns, wanted, period))
        .group_by(*keys)
        .subquery()
    )
    query, ordering = _page(grouped, by, order, limit, after)
    found = connection.execute(query).all()
    rows = [_group(row, by) for row in found[:limit]]
    next_after = None
    if len(found) > limit:
        next_after = tuple(_plain(found[limit - 1]._mapping[item.by]) for item in ordering)
    return GroupPage(rows=rows, next_after=next_after, period=period)


def can_have_latency(wanted: UsageFilter, by: Sequence[Dimension]) -> bool:
    """Whether :func:`latencies` answers this: it knows time, account, model and token only."""
    is_finer = wanted.sessions or wanted.surfaces or wanted.statuses or wanted.is_about_single_requests
    return not is_finer and set(by) <= _WITH_LATENCY


def latencies(
    connection: Connection, wanted: UsageFilter, by: Sequence[Dimension] = ()
) -> dict[Keyset, LatencySummary]:
    """Percentiles per combination of ``by``, for groups that have any. Raises ValueError as documented."""
    if not can_have_latency(wanted, by):
        raise ValueError("latencies are kept by time, account, model and token only")
    is_daily = _is_daily(wanted, by)
    columns = (schema.latency_days if is_daily else schema.latency_quarters).c
    period = _widened(wanted.period, MICROS_PER_DAY if is_daily else MICROS_PER_QUARTER)
    keys = [_key(columns, dimension) for dimension in by]
    query = (
        select(*keys, columns.metric, columns.bucket, func.sum(columns.num_requests))
        .where(*_conditions(columns, wanted, period))
        .group_by(*keys, columns.metric, columns.bucket)
    )
    found: dict[Keyset, dict[str, dict[int, int]]] = {}
    for *key, metric, bucket, count in connection.execute(query):
        histograms = found.setdefault(tuple(_plain(value) for value in key), {})
        histograms.setdefault(metric, {})[bucket] = int(count)
    return {
        key: summarize(histograms.get("ttft_us", {}), histograms.get("speed_milli", {}))
        for key, histograms in found.items()
    }


def _source(wanted: UsageFilter, by: Sequence[Dimension]) -> tuple[FromClause, int]:
    """The smallest table that can answer, and the width of its time buckets."""
    if wanted.is_about_single_requests:
        return _single_requests(wanted), 1
    if "session" in by or wanted.sessions:
        if "quarter" in by:
            raise ValueError("sessions are kept by the hour, not by the quarter of one")
        return schema.rollup_sessions, MICROS_PER_HOUR
    if _is_daily(wanted, by):
        return schema.rollup_days, MICROS_PER_DAY
    return schema.rollup_quarters, MICROS_PER_QUARTER


def _is_daily(wanted: UsageFilter, by: Sequence[Dimension]) -> bool:
    is_fine = "quarter" in by or "hour" in by
    return not is_fine and _widened(wanted.period, MICROS_PER_DAY) == wanted.period


def _single_requests(wanted: UsageFilter) -> Subquery:
    """The records in the form of a rollup: each one is a sum of its own."""
    usage, ledger = schema.usage_records.c, schema.ledger_transactions.c
    values: dict[str, ColumnElement[Any]] = {
        "num_requests": literal(1),
        "num_estimated": case((usage.is_estimated, 1), else_=0),
        "duration_us": usage.finished_at_us - usage.started_at_us,
    }
    for name in SUMS:
        if name not in values:
            values[name] = usage[name] if name in usage else ledger[name]
    return (
        select(
            usage.started_at_us.label("start_us"),
            *(usage[name] for name in _COLUMNS.values()),
            *(value.label(name) for name, value in values.items()),
        )
        .join_from(schema.usage_records, schema.ledger_transactions, ledger.id == usage.request_id)
        .where(ledger.neurons_e4 >= wanted.min_neurons_e4, usage.prompt_tokens >= wanted.min_prompt_tokens)
        .subquery()
    )


def _widened(period: Period, width_us: int) -> Period:
    """To whole buckets."""
    start_us, end_us = period.start_us, period.end_us
    return Period(
        None if start_us is None else start_us - start_us % width_us,
        None if end_us is None else end_us + -end_us % width_us,
    )


def _key(columns: Any, dimension: Dimension) -> ColumnElement[Any]:
    width_us = WIDTHS_US.get(dimension)
    if width_us is None:
        column: ColumnElement[Any] = columns[_COLUMNS[dimension]]
        return column
    return bucket_start(columns.start_us, width_us)


def _conditions(columns: Any, wanted: UsageFilter, period: Period) -> list[ColumnElement[bool]]:
    conditions: list[ColumnElement[bool]] = []
    if wanted.account_id is not None:
        conditions.append(columns.account_id == wanted.account_id)
    if period.start_us is not None:
        conditions.append(columns.start_us >= period.start_us)
    if period.end_us is not None:
        conditions.append(columns.start_us < period.end_us)
    for name, values in (
        ("model", wanted.models),
        ("token_id", wanted.token_ids),
        ("session", wanted.sessions),
        ("surface", wanted.surfaces),
        ("status", wanted.statuses),
    ):
        if values:
            conditions.append(columns[name].in_(values))
    return conditions


def _page(
    grouped: Subquery, by: Sequence[Dimension], order: Sequence[Order], limit: int, after: Keyset | None
) -> tuple[Select[Any], list[Order]]:
    """One row more than ``limit``, from behind ``after`` on; and the full order."""
    ordering = list(order)
    named = {item.by for item in ordering}
    ordering += [Order(dimension) for dimension in by if dimension not in named]
    unknown = [item.by for item in ordering if item.by not in grouped.c]
    if unknown:
        raise ValueError(f"{unknown[0]!r} is not part of the grouping")
    query = select(grouped).limit(limit + 1)
    if after is not None:
        if len(after) != len(ordering):
            raise ValueError("the cursor belongs to another grouping")
        query = query.where(_behind(grouped, ordering, after))
    directions = [
        grouped.c[item.by].desc() if item.is_descending else grouped.c[item.by].asc() for item in ordering
    ]
    return query.order_by(*directions), ordering


def _behind(grouped: Subquery, ordering: Sequence[Order], after: Keyset) -> ColumnElement[bool]:
    """Rows that come after the one with these values, in this order."""
    choices: list[ColumnElement[bool]] = []
    for index, (item, value) in enumerate(zip(ordering, after, strict=True)):
        column = grouped.c[item.by]
        further = column < value if item.is_descending else column > value
        same = [grouped.c[item.by] == value for item, value in zip(ordering[:index], after, strict=False)]
        choices.append(and_(*same, further))
    return or_(*choices)


def _group(row: Row[Any], by: Sequence[Dimension]) -> UsageGroup:
    values = row._mapping
    return UsageGroup(
        dimensions={dimension: _plain(values[dimension]) for dimension in by},
        **{name: int(values[name]) for name in SUMS},
    )


def _plain(value: Any) -> str | int:
    return value if isinstance(value, str) else int(value)
