"""What a replay showed, for readers and for programs."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence

import msgspec
from rich.console import Console
from rich.table import Table

from loadtest.quantiles import Quantiles, quantiles
from loadtest.replay.player import Played


class Targets(msgspec.Struct, frozen=True):
    """A request is good when both are met; seconds."""

    ttft_s: float
    tpot_s: float


class ReplayReport(msgspec.Struct, frozen=True, kw_only=True):
    """``miscounted`` are whole answers whose prompt tokens the API counts otherwise than they were made;
    ``goodput`` is good requests a second. ``ideal_cached_tokens`` is for a cache without end on one replica.
    """

    num_requests: int
    num_unsent: int
    num_late: int
    max_late_s: float
    duration_s: float
    errors: dict[str, int]
    miscounted: int
    prompt_tokens: int
    cached_tokens: int
    ideal_cached_tokens: int
    completion_tokens: int
    ttft: Quantiles
    tpot: Quantiles
    targets: Targets
    num_good: int
    goodput: float

    @property
    def cached_share(self) -> float:
        return self.cached_tokens / self.prompt_tokens if self.prompt_tokens else 0.0

    @property
    def ideal_share(self) -> float:
        return self.ideal_cached_tokens / self.prompt_tokens if self.prompt_tokens else 0.0

    @property
    def good_share(self) -> float:
        return self.num_good / self.num_requests if self.num_requests else 0.0


_LATE_S = 0.05


def report_of(
    played: Sequence[Played], num_unsent: int, ideal_cached_tokens: int, targets: Targets
) -> ReplayReport:
    """Sum up."""
    whole = [each for each in played if each.exchange.is_whole]
    tpots = [each.exchange.tpot_s for each in whole]
    duration_s = max((each.exchange.last_s for each in whole), default=0.0)
    duration_s -= min((each.exchange.sent_s - each.late_s - each.due_s for each in played), default=0.0)
    num_good = sum(_is_good(each, targets) for each in whole)
    return ReplayReport(
        num_requests=len(played),
        num_unsent=num_unsent,
        num_late=sum(each.late_s > _LATE_S for each in played),
        max_late_s=max((each.late_s for each in played), default=0.0),
        duration_s=max(duration_s, 0.0),
        errors=dict(Counter(each.exchange.error for each in played if each.exchange.error)),
        miscounted=sum(each.exchange.prompt_tokens != each.prompt.num_tokens for each in whole),
        prompt_tokens=sum(each.exchange.prompt_tokens for each in whole),
        cached_tokens=sum(each.exchange.cached_tokens for each in whole),
        ideal_cached_tokens=ideal_cached_tokens,
        completion_tokens=sum(each.exchange.completion_tokens for each in whole),
        ttft=quantiles([each.ttft_s for each in whole]),
        tpot=quantiles([tpot for tpot in tpots if tpot is not None]),
        targets=targets,
        num_good=num_good,
        goodput=num_good / duration_s if duration_s > 0 else 0.0,
    )


def _is_good(played: Played, targets: Targets) -> bool:
    tpot = played.exchange.tpot_s
    return played.ttft_s <= targets.ttft_s and (tpot is None or tpot <= targets.tpot_s)


def print_report(report: ReplayReport, console: Console) -> None:
    """A table for people."""
    table = Table("", "", title="Replay", title_justify="left", show_header=False)
    rows = [
        ("requests", f"{report.num_requests:,} in {report.duration_s:.1f} s"),
        ("not sent in time", f"{report.num_unsent:,}"),
        ("held back by the bound", f"{report.num_late:,}, at most {report.max_late_s:.2f} s"),
        ("failed", f"{sum(report.errors.values()):,}"),
        ("prompt tokens", f"{report.prompt_tokens:,}"),
        ("cached", f"{report.cached_tokens:,} ({report.cached_share:.1%})"),
        ("ideal for the trace", f"{report.ideal_cached_tokens:,} ({report.ideal_share:.1%})"),
        ("completion tokens", f"{report.completion_tokens:,}"),
        ("counted otherwise than made", f"{report.miscounted:,}"),
        ("TTFT p50 / p90 / p99", _line(report.ttft, 1.0, "s", 3)),
        ("TPOT p50 / p90 / p99", _line(report.tpot, 1000.0, "ms", 1)),
        (
            f"good: TTFT {report.targets.ttft_s:g} s, TPOT {1000 * report.targets.tpot_s:g} ms",
            f"{report.good_share:.1%}, {report.goodput:.2f} a second",
        ),
    ]
    for row in rows:
        table.add_row(*row)
    console.print(table)
    for error, count in sorted(report.errors.items(), key=lambda item: -item[1])[:10]:
        console.print(f"  {count:,} x {error}", markup=False)


def _line(values: Quantiles, factor: float, unit: str, digits: int) -> str:
    figures = (f"{factor * value:.{digits}f}" for value in (values.p50, values.p90, values.p99))
    return " / ".join(figures) + f" {unit}"
