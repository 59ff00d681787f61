"""``python -m kernels.interpret``: every Triton kernel against its reference, in Triton's interpreter.

The interpreter has to be chosen before a kernel's module is imported, so this is a process of its own
(``TRITON_INTERPRET=1``). Outputs are filled with NaN before a kernel runs, and inputs stand in NaN.
"""

from __future__ import annotations

import argparse
import json
import sys
import time
import traceback
from collections.abc import Sequence
from dataclasses import asdict, dataclass

import torch

from kernels.launching import INTERPRETER, Launcher, is_interpreted, launch_now
from kernels.trial import Trial, difference

MAX_PROGRAMS = 200
"""A small trial that starts more programs is refused: the interpreter takes milliseconds for each."""


@dataclass(frozen=True, slots=True)
class Outcome:
    """How one trial went; ``problem`` is empty when it is right."""

    op: str
    name: str
    dtype: str
    problem: str
    seconds: float


def run_trial(trial: Trial, dtype: torch.dtype) -> Outcome:
    """Run one trial on the CPU and compare it with its reference."""
    begin = time.perf_counter()
    programs = 0

    def counted(*arguments: object, **options: object) -> None:
        nonlocal programs
        grid = arguments[1]
        if isinstance(grid, tuple):
            programs += torch.Size(grid).numel()
        launch_now(*arguments, **options)  # type: ignore[arg-type]

    launch: Launcher = counted
    try:
        prepared = trial.prepare(trial.setting("cpu", dtype))
        expected = [x.clone() for x in prepared.expect()]
        problem = difference(prepared.run(launch), expected, trial.tolerance)
        if not problem and programs > MAX_PROGRAMS:
            problem = f"starts {programs} programs, more than {MAX_PROGRAMS}"
    except Exception:  # noqa: BLE001 - whatever a broken kernel raises is this trial's result
        problem = traceback.format_exc(limit=-3)
    return Outcome(trial.op, trial.name, str(dtype)[6:], problem, time.perf_counter() - begin)


def main(argv: Sequence[str] | None = None) -> int:
    """Run the trials; prints a line for each, or a JSON array of outcomes."""
    parser = argparse.ArgumentParser(prog="python -m kernels.interpret", description=__doc__)
    parser.add_argument("--only", default="", help="only trials whose title contains this")
    parser.add_argument("--json", action="store_true", help="print outcomes as JSON")
    arguments = parser.parse_args(argv)
    if not is_interpreted():
        sys.stderr.write(f"set {INTERPRETER}=1\n")
        return 2
    from kernels.trials import SMALL

    torch.use_deterministic_algorithms(True)
    outcomes = []
    for trial in SMALL:
        if arguments.only not in trial.title:
            continue
        for dtype in trial.types:
            outcome = run_trial(trial, dtype)
            outcomes.append(outcome)
            if not arguments.json:
                title = f"{trial.title} ({outcome.dtype})"
                sys.stdout.write(f"{title:<72} {outcome.seconds:>6.2f} s  {outcome.problem or 'right'}\n")
    if arguments.json:
        json.dump([asdict(outcome) for outcome in outcomes], sys.stdout)
    return 1 if any(outcome.problem for outcome in outcomes) or not outcomes else 0


if __name__ == "__main__":
    sys.exit(main())
