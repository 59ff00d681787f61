"""``embergate simulate``: what a fleet will do, before it is bought."""

from __future__ import annotations

import gc
import resource
import shlex
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import click

from billing.rates import NoRateError
from embergate.commands.books import rate_book
from embergate.commands.context import with_settings
from embergate.commands.simulate_tools import caches, fit_profile, profiles, routing
from embergate.commands.simulation_options import policies_of, scenario_of, workload_options
from embergate.config_file import Settings
from embergate.refusal import Refusal
from embergate.terminal import print_json, print_table, say, voice
from embergate.voice import Voice
from simulator.assumptions import assumptions
from simulator.cost import Bill, bill_of
from simulator.measures import Results
from simulator.policies import make_policies
from simulator.scenario import Scenario, SessionSource
from simulator.sizing import Need, least_replicas
from simulator.trace import TraceError

_SURE_AFTER_S = 3.0
"""So long it takes until the rest can be told from what is done."""


@click.group()
def simulate() -> None:
    """Simulate a fleet: policies, sizes, failures, cost. Nothing needs to run."""


for tool in (caches, routing, profiles, fit_profile):
    simulate.add_command(tool)


@simulate.command()
@click.option("--replicas", "num_replicas", type=int, default=8, show_default=True)
@click.option("--policies", default="rendezvous,bounded-load,least-loaded,round-robin", show_default=True,
              help="Which to compare: " + ", ".join(make_policies()) + ".")  # fmt: skip
@click.option("--event", "events", multiple=True, metavar="EVENT",
              help="add:replica-8@600, drain:replica-0@1200 or fail:replica-3@900; repeatable.")  # fmt: skip
@click.option("--split", "split_text", metavar="P+D",
              help="Each replica is a group with P prefill and D decode replicas.")  # fmt: skip
@click.option(
    "--window", "window_s", type=float, default=60.0, show_default=True, help="Seconds a point in plots."
)
@click.option("--model", "priced_model", default="@cf/moonshotai/kimi-k2.5", show_default=True,
              help="Whose rate card prices the tokens.")  # fmt: skip
@click.option(
    "--report", type=click.Path(dir_okay=False, path_type=Path), metavar="FILE", help="Write a page."
)
@click.option("--plot", type=click.Path(dir_okay=False, path_type=Path), metavar="FILE",
              help="Write hit ratio and waiting over time as SVG.")  # fmt: skip
@workload_options
@with_settings
def run(settings: Settings, /, **given: Any) -> None:
    """Run a workload under several routing policies and compare them."""
    scenario = scenario_of(given)
    runs = [_run(scenario, policy, quiet=given["as_json"]) for policy in policies_of(given["policies"])]
    bills = [_bill(settings, each, given["priced_model"]) for each in runs]
    if given["as_json"]:
        print_json([{"results": each, "bill": bill} for each, bill in zip(runs, bills, strict=True)])
    else:
        _print_runs(runs, bills)
    if given["report"] is not None:
        _write_report(given["report"], scenario, runs, bills)
    if given["plot"] is not None:
        _write_plot(given["plot"], scenario, runs)


@simulate.command()
@click.option("--policy", type=click.Choice(list(make_policies())), default="rendezvous", show_default=True)
@click.option("--max-replicas", type=click.IntRange(min=1), default=512, show_default=True)
@workload_options
@with_settings
def size(settings: Settings, /, policy: str, max_replicas: int, **given: Any) -> None:
    """Find the least number of replicas whose p90 meets --ttft and --tpot."""
    given |= {"num_replicas": 1}
    scenario = scenario_of(given)
    need = Need(ttft_p90_s=given["ttft_s"], tpot_p90_s=given["tpot_s"])
    found = least_replicas(
        lambda count: _run(scenario_of(given | {"num_replicas": count}), policy, quiet=given["as_json"]),
        need,
        max_replicas,
    )
    if given["as_json"]:
        print_json(found)
        return
    _print_runs(found.runs, [None] * len(found.runs), by_replicas=True)
    if found.num_replicas is None:
        raise Refusal(
            f"even {max_replicas} replicas do not meet the target; raise --max-replicas or the target"
        )
    gpus = found.num_replicas * scenario.profile.num_gpus
    say(f"{found.num_replicas} replicas ({gpus} GPUs) meet TTFT p90 {need.ttft_p90_s:g} s, "
        f"TPOT p90 {1000 * need.tpot_p90_s:g} ms.")  # fmt: skip


@simulate.command()
@click.option("--replicas", "num_replicas", type=int, default=8, show_default=True)
@workload_options
@with_settings
def check(settings: Settings, /, **given: Any) -> None:
    """Run the step model and the flow model on one workload and say how far they differ."""
    runs = [
        _run(scenario_of(given | {"fidelity": fidelity}), "rendezvous", quiet=given["as_json"])
        for fidelity in ("step", "flow")
    ]
    if given["as_json"]:
        print_json(dict(zip(("step", "flow"), runs, strict=True)))
        return
    columns = ("cached", "TTFT p50 s", "TTFT p90 s", "TPOT p50 ms")
    rows = [
        (
            name,
            f"{each.hit_ratio:.4f}",
            f"{each.ttft.p50:.3f}",
            f"{each.ttft.p90:.3f}",
            f"{1e3 * each.tpot.p50:.2f}",
        )
        for name, each in zip(("step", "flow"), runs, strict=True)
    ]
    print_table(("model of time", *columns), rows, numeric=columns)


def _run(scenario: Scenario, policy: str, *, quiet: bool) -> Results:
    """One policy, with a bar on standard error. There are millions of objects and no cycles, so that the
    collector may rest.
    """
    started = time.process_time()
    gc.disable()
    try:
        with voice() as speaker:
            progress = _reporter(speaker, policy, _num_expected(scenario))
            results = scenario.run(policy, (lambda num, now_s: None) if quiet else progress)
            if not quiet:
                speaker.progress(1.0, f"{policy}: {results.num_requests:,} requests")
    except TraceError as error:
        raise Refusal(str(error)) from error
    finally:
        gc.enable()
    if not quiet:
        peak_mib = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024
        say(
            f"{policy}: {results.num_requests:,} requests in {time.process_time() - started:.1f} s of CPU; "
            f"this process has had {peak_mib:,.0f} MiB of memory at most"
        )
    return results


def _reporter(speaker: Voice, policy: str, total: float) -> Callable[[int, float], None]:
    """Moves the bar, and says how long it may still take once that can be told."""
    began = time.monotonic()

    def progress(num_requests: int, now_s: float) -> None:
        share = min(1.0, num_requests / total) if total else 0.0
        passed = time.monotonic() - began
        left = f", {passed * (1.0 - share) / share:,.0f} s left" if share and passed > _SURE_AFTER_S else ""
        speaker.progress(share, f"{policy}: {num_requests:,} requests, {now_s / 60:,.0f} min{left}")

    return progress


def _num_expected(scenario: Scenario) -> float:
    source = scenario.source
    if isinstance(source, SessionSource):
        return source.shape.num_sessions * source.shape.mean_turns
    return source.scale.max_requests or 0


def _bill(settings: Settings, results: Results, model: str) -> Bill | None:
    try:
        return bill_of(results, rate_book(settings), model, time.time_ns() // 1000)
    except NoRateError:
        return None


def _print_runs(runs: Sequence[Results], bills: Sequence[Bill | None], *, by_replicas: bool = False) -> None:
    columns = ("requests", "refused", "cached", "TTFT p50", "p90", "p99 s", "TPOT p50", "p90 ms", "imbalance",
               "goodput/s", "saved")  # fmt: skip
    rows = [
        (
            f"{each.num_replicas}" if by_replicas else each.policy,
            f"{each.num_requests:,}",
            f"{each.num_refused:,}",
            f"{each.hit_ratio:.1%}",
            f"{each.ttft.p50:.2f}",
            f"{each.ttft.p90:.2f}",
            f"{each.ttft.p99:.2f}",
            f"{1e3 * each.tpot.p50:.1f}",
            f"{1e3 * each.tpot.p90:.1f}",
            f"{each.imbalance:.2f}",
            f"{each.goodput:.2f}",
            f"{bill.saved_share:.1%}" if bill else "-",
        )
        for each, bill in zip(runs, bills, strict=True)
    ]
    print_table(("replicas" if by_replicas else "policy", *columns), rows, numeric=columns)


def _write_report(
    path: Path, scenario: Scenario, runs: Sequence[Results], bills: Sequence[Bill | None]
) -> None:
    from simulator.report import Page, render

    page = Page(
        title=f"{scenario.num_replicas} replicas under {len(runs)} policies",
        scenario=scenario,
        runs=runs,
        bills=bills,
        assumptions=assumptions(scenario),
        command="embergate " + shlex.join(sys.argv[1:]),
    )
    path.write_text(render(page), encoding="utf-8")
    say(f"Wrote {path}")


def _write_plot(path: Path, scenario: Scenario, runs: Sequence[Results]) -> None:
    from simulator.plots import over_time

    path.write_text(over_time(runs, scenario.marks()), encoding="utf-8")
    say(f"Wrote {path}")
