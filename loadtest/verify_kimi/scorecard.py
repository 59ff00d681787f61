"""From marks to rows: what was seen, how often it was right, and whether that is enough."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Any

from rich.table import Table

GOOD, BAD = "good", "bad"
_MAX_EXAMPLES = 5


@dataclass(frozen=True)
class Mark:
    """One thing that was looked at. Outcomes but ``good`` and ``bad`` are counted and judge nothing."""

    row: str
    outcome: str
    detail: str = ""


@dataclass(frozen=True)
class RowKind:
    """A row of the card. ``is_structural``: it holds for any weights. ``least``: the share that is enough."""

    name: str
    meaning: str
    least: float
    is_structural: bool = True
    may_be_empty: bool = False


@dataclass
class Row:
    """A judged row. ``value`` is None when there was nothing to judge."""

    kind: RowKind
    value: float | None
    counts: dict[str, int]
    is_asserted: bool
    examples: list[str] = field(default_factory=list)

    @property
    def is_met(self) -> bool:
        if self.value is None:
            return self.kind.may_be_empty
        return self.value >= self.kind.least

    @property
    def verdict(self) -> str:
        if not self.is_asserted:
            return "not asserted"
        return "pass" if self.is_met else "FAIL"

    def as_json(self) -> dict[str, Any]:
        return {
            "name": self.kind.name,
            "value": self.value,
            "least": self.kind.least,
            "counts": self.counts,
            "verdict": self.verdict,
            "examples": self.examples,
        }


class Scorecard:
    """All rows.

    Args:
        kinds: which there are.
        has_random_weights: asserts the structural ones only.
    """

    def __init__(self, kinds: Iterable[RowKind], *, has_random_weights: bool) -> None:
        self._kinds = list(kinds)
        self._has_random_weights = has_random_weights
        self._counts: dict[str, Counter[str]] = {kind.name: Counter() for kind in self._kinds}
        self._examples: dict[str, list[str]] = {kind.name: [] for kind in self._kinds}

    def add(self, mark: Mark) -> None:
        """Count a mark, and keep the first few details of what was bad.

        Raises:
            KeyError: it is of no row.
        """
        self._counts[mark.row][mark.outcome] += 1
        examples = self._examples[mark.row]
        if mark.outcome == BAD and mark.detail and len(examples) < _MAX_EXAMPLES:
            examples.append(mark.detail)

    def rows(self) -> list[Row]:
        """Every row, judged."""
        return [
            Row(
                kind,
                _value(kind.name, self._counts[kind.name]),
                dict(self._counts[kind.name]),
                kind.is_structural or not self._has_random_weights,
                self._examples[kind.name],
            )
            for kind in self._kinds
        ]

    @property
    def is_passed(self) -> bool:
        return all(row.is_met for row in self.rows() if row.is_asserted)

    def as_json(self) -> dict[str, Any]:
        """The card for programs."""
        rows = [row.as_json() for row in self.rows()]
        return {"passed": self.is_passed, "random_weights": self._has_random_weights, "rows": rows}

    def table(self, *, is_wide: bool) -> Table:
        """The card for people, on a wide screen with what each row means."""
        table = Table(title="Kimi, verified from outside", title_justify="left")
        for column in ("row", "value", "at least", "verdict", "counts"):
            table.add_column(column, no_wrap=column != "counts", overflow="fold")
        if is_wide:
            table.add_column("what it means", overflow="fold")
        for row in self.rows():
            value = "-" if row.value is None else f"{row.value:.1%}"
            counts = ", ".join(f"{count} {outcome}" for outcome, count in sorted(row.counts.items()))
            cells = (row.kind.name, value, f"{row.kind.least:.0%}", row.verdict, counts)
            table.add_row(*cells, *((row.kind.meaning,) if is_wide else ()))
        return table


def _value(name: str, counts: Counter[str]) -> float | None:
    if name.startswith("trigger"):
        return trigger_score(name, counts)
    judged = counts[GOOD] + counts[BAD]
    return counts[GOOD] / judged if judged else None


def trigger_score(name: str, counts: Counter[str]) -> float | None:
    """Precision, recall or F1 of the decision to call a tool, from tp, fp, fn and tn."""
    hit, false, missed = counts["tp"], counts["fp"], counts["fn"]
    if not hit + false + missed + counts["tn"]:
        return None
    if name.endswith("precision"):
        return hit / (hit + false) if hit + false else 0.0
    if name.endswith("recall"):
        return hit / (hit + missed) if hit + missed else 0.0
    return 2 * hit / (2 * hit + false + missed) if hit + false + missed else 0.0
