"""``python -m kernels.gpu_check``: every Triton kernel on a GPU at the real shapes: right, then how fast.

A trial that differs from its reference gets no time. Times are medians of replays of a CUDA graph, so they
hold no cost of launching; beside each stands the share of what the card could do at best (the longer of
moving the trial's bytes and of computing its sums) and the time of other implementations that are installed.

Without a GPU it runs dry: it says for each trial what would be started and how long the card would take at
best, and compiles all of it for the card. No figure of a dry run is a measurement.
"""

from __future__ import annotations

import argparse
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

import torch

from kernels.compile_ahead import compile_trial, record
from kernels.launching import launch_now
from kernels.trial import Prepared, Trial, difference

BUDGET_S = 440.0
"""After this long no further trial is begun."""


@dataclass(frozen=True, slots=True)
class Card:
    """What a card can do at best, per second: bytes, and multiplications and additions in 16 and 8 bits."""

    name: str
    bytes_per_s: float
    flops_per_s: float
    float8_flops_per_s: float

    def best_s(self, num_bytes: int, num_flops: int, *, in_float8: bool) -> float:
        """The least time that so much work can take."""
        rate = self.float8_flops_per_s if in_float8 else self.flops_per_s
        return max(num_bytes / self.bytes_per_s, num_flops / rate)


CARDS = (
    Card("H200", 4.8e12, 989e12, 1979e12),
    Card("H100", 3.35e12, 989e12, 1979e12),
    Card("A100", 2.0e12, 312e12, 312e12),
)
"""From the makers' data sheets, dense; the first is the one that a dry run supposes."""


@dataclass(frozen=True, slots=True)
class Row:
    """One line of the table; a trial that is wrong or was left out has only a remark."""

    title: str
    work: str
    best_us: float
    actual_us: float | None = None
    others: str = ""
    remark: str = ""

    def markdown(self) -> str:
        """The line as Markdown."""
        if self.actual_us is None:
            return f"| {self.title} | {self.work} | {self.best_us:.1f} | | | {self.others} | {self.remark} |"
        share = self.best_us / self.actual_us
        return (
            f"| {self.title} | {self.work} | {self.best_us:.1f} | {self.actual_us:.1f} | {share:.0%} "
            f"| {self.others} | {self.remark} |"
        )


_HEADING = (
    "| trial | work | at best, us | Triton, us | share | others | remark |\n|---|---|---|---|---|---|---|"
)


def main(argv: Sequence[str] | None = None) -> int:
    """Check and time, or run dry; the table comes last. Gives 1 when a kernel is wrong or does not fit."""
    parser = argparse.ArgumentParser(prog="python -m kernels.gpu_check", description=__doc__)
    parser.add_argument("--only", default="", help="only trials whose title contains this")
    parser.add_argument("--write", type=Path, help="write the table of a run on a GPU to this page")
    parser.add_argument("--no-compile", action="store_true", help="dry: compile nothing")
    arguments = parser.parse_args(argv)
    from kernels.trials import REAL

    trials = [trial for trial in REAL if arguments.only in trial.title]
    if not torch.cuda.is_available():
        return _run_dry(trials, compiles=not arguments.no_compile)
    name = torch.cuda.get_device_name()
    card = next((card for card in CARDS if card.name in name), CARDS[0])
    rows = _run(trials, card)
    page = "\n".join(
        (
            f"# Kernels on {name}",
            "",
            f"Shares are of an {card.name}'s data sheet. Made by `make gpu-check`.",
            "",
        )
    )
    table = "\n".join((_HEADING, *(row.markdown() for row in rows)))
    if arguments.write:
        arguments.write.write_text(f"{page}\n{table}\n", encoding="utf-8")
    sys.stdout.write(f"{page}\n{table}\n")
    return 1 if any("wrong" in row.remark for row in rows) else 0


def _run(trials: Sequence[Trial], card: Card) -> list[Row]:
    deadline = time.monotonic() + BUDGET_S
    rows = []
    for trial in trials:
        if time.monotonic() > deadline:
            rows.append(Row(trial.title, "", 0.0, remark="left out: no time"))
            continue
        rows.append(_check(trial, card))
        sys.stderr.write(f"{rows[-1].markdown()}\n")
        torch.cuda.empty_cache()
    return rows


def _check(trial: Trial, card: Card) -> Row:
    prepared = trial.prepare(trial.setting("cuda", torch.bfloat16))
    work, best_us = _work(trial, prepared, card)
    expected = [x.clone() for x in prepared.expect()]
    if problem := difference(prepared.run(launch_now), expected, trial.tolerance):
        return Row(trial.title, work, best_us, remark=f"wrong: {problem}")
    del expected
    others = [f"{name} {_time(run):.1f}" for name, run in prepared.alternatives.items()]
    return Row(
        trial.title, work, best_us, _time(lambda: prepared.run(launch_now)), ", ".join(others), "right"
    )


def _time(run: Callable[[], object]) -> float:
    """Microseconds of one call, as part of a replayed CUDA graph."""
    import triton

    return float(triton.testing.do_bench_cudagraph(run, rep=50)) * 1e3


def _work(trial: Trial, prepared: Prepared, card: Card) -> tuple[str, float]:
    """What a trial moves and computes, in words, and the microseconds that ``card`` needs at best."""
    in_float8 = trial.op == "fp8_gemm"
    best_s = card.best_s(prepared.num_bytes, prepared.num_flops, in_float8=in_float8)
    return f"{prepared.num_bytes / 1e6:.1f} MB, {prepared.num_flops / 1e9:.1f} GFLOP", best_s * 1e6


def _run_dry(trials: Sequence[Trial], *, compiles: bool) -> int:
    """Say what a GPU would be asked to do, and compile it."""
    card = CARDS[0]
    sys.stdout.write(
        f"No GPU here: a dry run. On a GPU each trial is compared with its reference in bfloat16, then\n"
        f"timed within {BUDGET_S:.0f} s. Times below are an {card.name}'s at best, not measurements.\n\n"
    )
    failures = 0
    done: set[tuple[object, ...]] = set()
    rows = []
    for trial in trials:
        prepared = trial.prepare(trial.setting("meta", torch.bfloat16))
        work, best_us = _work(trial, prepared, card)
        launches = record(trial)
        plan = ", ".join(f"{launch.kernel.__name__} x {launch.num_programs}" for launch in launches)
        rows.append(
            Row(trial.title, work, best_us, None, ", ".join(prepared.alternatives), f"would start {plan}")
        )
        for result in compile_trial(trial, done) if compiles else ():
            failures += bool(result.problem)
            sys.stdout.write(
                f"compiled {result.kernel} for {trial.title}: {result.registers} registers, "
                f"{result.shared_bytes} B shared{', ' + result.problem if result.problem else ''}\n"
            )
            sys.stdout.flush()
    table = "\n".join((_HEADING, *(row.markdown() for row in rows)))
    sys.stdout.write(f"\n{table}\n\n{len(rows)} trials planned, nothing was run on a GPU.\n")
    return 1 if failures or not rows else 0


if __name__ == "__main__":
    sys.exit(main())
