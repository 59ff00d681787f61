"""Series over time for the charting library, and the same figures as a table for those who read it."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import msgspec
from sqlalchemy import Connection

from billing.analytics import UsageGroup, can_have_latency, latencies, shown, usage_groups
from billing.latency import LatencySummary
from billing.money import NANOS_PER_UNIT
from gateway.dashboard.scope import Scope

_MICROS = 1_000_000
_MAX_BUCKETS = 1_000


class Series(msgspec.Struct, frozen=True):
    """One line or row of bars; None where there is nothing to show. ``colour`` is one of the theme's."""

    label: str
    kind: str
    colour: str
    values: list[float | None]


class Chart(msgspec.Struct, frozen=True, kw_only=True):
    """``unit`` is money, share, ms or speed; ``x`` are seconds, ``labels`` the same in words."""

    id: str
    title: str
    unit: str
    x: list[int]
    labels: list[str]
    series: list[Series]

    @property
    def is_empty(self) -> bool:
        return not any(value for each in self.series for value in each.values)

    def has_values(self, row: int) -> bool:
        """Whether the time bucket has anything to show."""
        return any(each.values[row] for each in self.series)

    def words(self, value: float | None) -> str:
        """A value as the table shows it."""
        if value is None:
            return "–"
        return {"share": f"{value:.1%}", "money": f"{value:,.6f}"}.get(self.unit, f"{value:,.1f}")

    def data(self) -> dict[str, Any]:
        """What the page's script draws."""
        return {
            "unit": self.unit,
            "x": self.x,
            "series": [msgspec.structs.asdict(each) for each in self.series],
        }


def charts(connection: Connection, scope: Scope) -> list[Chart]:
    """Spend, cached share, time to the first token, speed. The last two where they are kept."""
    by = (scope.grain,)
    groups = {
        int(row.dimensions[scope.grain]): row
        for row in usage_groups(connection, scope.wanted, by, limit=_MAX_BUCKETS).rows
    }
    found = [
        _chart(
            scope,
            "spend",
            "Spend",
            "money",
            _series("Without the cache discount", "bars", "ghost", scope, groups, _undiscounted),
            _series("Charged", "bars", "accent", scope, groups, _amount),
        ),
        _chart(
            scope,
            "cached",
            "Cached share of prompt tokens",
            "share",
            _series("Cached", "area", "cool", scope, groups, _cached_share),
        ),
    ]
    if can_have_latency(scope.wanted, by):
        times = {int(key[0]): each for key, each in latencies(connection, scope.wanted, by).items()}
        found += [
            _chart(
                scope,
                "ttft",
                "Time to the first token",
                "ms",
                _series("p50", "line", "accent", scope, times, lambda each: each.ttft_ms_p50),
                _series("p90", "line", "cool", scope, times, lambda each: each.ttft_ms_p90),
                _series("p99", "line", "violet", scope, times, lambda each: each.ttft_ms_p99),
            ),
            _chart(
                scope,
                "speed",
                "Tokens a second after it",
                "speed",
                _series("p50", "line", "accent", scope, times, lambda each: each.tokens_per_second_p50),
                _series("p90", "line", "cool", scope, times, lambda each: each.tokens_per_second_p90),
                _series("p99", "line", "violet", scope, times, lambda each: each.tokens_per_second_p99),
            ),
        ]
    return found


def _chart(scope: Scope, chart_id: str, title: str, unit: str, *series: Series) -> Chart:
    starts = scope.starts_us
    return Chart(
        id=chart_id,
        title=title,
        unit=unit,
        x=[start_us // _MICROS for start_us in starts],
        labels=[shown(scope.grain, start_us) for start_us in starts],
        series=list(series),
    )


def _series(
    label: str,
    kind: str,
    colour: str,
    scope: Scope,
    rows: dict[int, Any],
    value_of: Callable[[Any], float | None],
) -> Series:
    values = [None if (row := rows.get(start_us)) is None else value_of(row) for start_us in scope.starts_us]
    if kind == "bars":
        values = [value or 0.0 for value in values]
    return Series(label, kind, colour, values)


def _amount(row: UsageGroup) -> float:
    return row.amount_nanos / NANOS_PER_UNIT


def _undiscounted(row: UsageGroup) -> float:
    return row.undiscounted_nanos / NANOS_PER_UNIT


def _cached_share(row: UsageGroup) -> float | None:
    return row.cached_share if row.prompt_tokens else None


def latency_of(connection: Connection, scope: Scope) -> LatencySummary:
    """Over the whole period; all None where it is not kept."""
    if not can_have_latency(scope.wanted, ()):
        return LatencySummary()
    return latencies(connection, scope.wanted).get((), LatencySummary())


def top(rows: Sequence[UsageGroup], num: int) -> list[tuple[UsageGroup, float]]:
    """The first rows, each with its share of the dearest one's amount."""
    most = max((row.amount_nanos for row in rows), default=0)
    return [(row, row.amount_nanos / most if most else 0.0) for row in rows[:num]]
