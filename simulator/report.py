"""Runs as one page: figures, tables and what they rest on. No script, nothing loaded from anywhere."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from jinja2 import Environment, PackageLoader, StrictUndefined

from billing.money import format_nanos
from simulator.cost import Bill, tokens_per_day
from simulator.measures import Results
from simulator.plots import by_policy, over_time
from simulator.scenario import Scenario


@dataclass(frozen=True, slots=True)
class Page:
    """What goes on the page. ``assumptions`` are (what, value) rows; ``bills`` are parallel to ``runs``."""

    title: str
    scenario: Scenario
    runs: Sequence[Results]
    bills: Sequence[Bill | None]
    assumptions: Sequence[tuple[str, str]]
    command: str


def render(page: Page) -> str:
    """The page as HTML."""
    environment = Environment(
        loader=PackageLoader("simulator", "."), autoescape=True, undefined=StrictUndefined, trim_blocks=True
    )
    return environment.get_template("report.html").render(
        page=page,
        rows=list(zip(page.runs, page.bills, strict=True)),
        money=lambda nanos: format_nanos(nanos, 2),
        tokens_per_day=tokens_per_day,
        by_policy=by_policy(page.runs),
        over_time=over_time(page.runs, page.scenario.marks()),
    )
