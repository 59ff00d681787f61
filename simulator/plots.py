"""Pictures of runs, as SVG text for a page."""

from __future__ import annotations

import io
from collections.abc import Sequence

from matplotlib.axes import Axes
from matplotlib.backends.backend_svg import FigureCanvasSVG
from matplotlib.figure import Figure

from simulator.measures import Results

_COLOURS = ("#0f766e", "#c2410c", "#4338ca", "#a16207", "#be185d", "#475569", "#15803d")


def over_time(runs: Sequence[Results], marks: Sequence[tuple[float, str]] = ()) -> str:
    """Hit ratio and median time to first token by time of arrival; ``marks`` are moments with a name."""
    figure, (above, below) = _figure(2)
    for run, colour in zip(runs, _cycle(len(runs)), strict=True):
        minutes = [window.start_s / 60 for window in run.windows]
        above.plot(
            minutes, [100 * window.hit_ratio for window in run.windows], color=colour, label=run.policy
        )
        below.plot(minutes, [window.ttft_p50_s for window in run.windows], color=colour)
    for axes in (above, below):
        for at_s, name in marks:
            axes.axvline(at_s / 60, color="#94a3b8", linestyle=":", linewidth=1)
            axes.annotate(name, (at_s / 60, axes.get_ylim()[1]), fontsize=7, color="#64748b")
    above.set_ylabel("cached, % of prompt")
    below.set_ylabel("TTFT, median s")
    below.set_xlabel("minutes")
    above.legend(fontsize=8, frameon=False, ncols=3)
    return _svg(figure)


def by_policy(runs: Sequence[Results]) -> str:
    """Hit ratio, waiting and balance side by side."""
    figure, axes = _figure(1, 3)
    names = [run.policy for run in runs]
    panels = (
        ("cached, % of prompt", [100 * run.hit_ratio for run in runs]),
        ("TTFT p90, s", [run.ttft.p90 for run in runs]),
        ("largest replica / mean", [run.imbalance for run in runs]),
    )
    for panel, (title, values) in zip(axes, panels, strict=True):
        bars = panel.barh(names, values, color=_cycle(len(runs)))
        panel.bar_label(bars, fmt="%.3g", fontsize=8, padding=2)
        panel.set_title(title, fontsize=9)
        panel.invert_yaxis()
        panel.margins(x=0.2)
    for panel in axes[1:]:
        panel.set_yticklabels([])
    return _svg(figure)


def _figure(rows: int, columns: int = 1) -> tuple[Figure, list[Axes]]:
    figure = Figure(figsize=(9, 2.4 * rows + 0.6), layout="constrained")
    FigureCanvasSVG(figure)
    axes = figure.subplots(rows, columns, squeeze=False, sharex=columns == 1).ravel().tolist()
    for panel in axes:
        panel.spines[["top", "right"]].set_visible(False)
        panel.tick_params(labelsize=8)
    return figure, axes


def _cycle(count: int) -> list[str]:
    return [_COLOURS[index % len(_COLOURS)] for index in range(count)]


def _svg(figure: Figure) -> str:
    file = io.StringIO()
    figure.savefig(file, format="svg", metadata={"Date": None}, transparent=True)
    text = file.getvalue()
    return text[text.index("<svg") :]
