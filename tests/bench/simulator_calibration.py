"""What the simulator is told of this machine: the time of steps, alone and beside another engine, and what a
request takes besides its steps.
"""

from __future__ import annotations

import statistics
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path

import aiohttp
import msgspec

from loadtest.exchange import Endpoint, ask
from loadtest.replay.words import WORDS
from simulator.step_time import MeasuredStep, StepTime, fit, read_steps
from tests.bench.bench_steps import measure_together

_NUM_PROBES = 9


@dataclass
class StepTables:
    """Measured steps of one engine that has the machine to itself, and of two side by side."""

    alone: list[MeasuredStep] = field(default_factory=list)
    together: list[MeasuredStep] = field(default_factory=list)

    def measure(self, scratch: Path, seconds: float) -> None:
        """Measure for so long alone, and as long side by side; adds to what is there."""
        for rows, num_engines in ((self.alone, 1), (self.together, 2)):
            path = scratch / f"steps-{num_engines}.jsonl"
            measure_together(path, seconds, num_engines)
            rows += read_steps(path)


class Fit(msgspec.Struct, frozen=True):
    """``slowdown`` is the median of measured over fitted time of steps beside another engine;
    ``beside_error`` the median error of the fit with it.
    """

    times: StepTime
    slowdown: float
    beside_error: float
    num_steps: int


def fitted(tables: StepTables) -> Fit:
    """The time of steps from those that had the machine to themselves; the slowdown from the others.

    Raises:
        ProfileError: too few steps.
    """
    times = fit(tables.alone, "steps of this machine")
    ratios = [step.step_s / times.predicted_s(step) for step in tables.together]
    slowdown = max(1.0, statistics.median(ratios))
    return Fit(
        times,
        slowdown,
        statistics.median(abs(slowdown / ratio - 1.0) for ratio in ratios),
        len(tables.alone) + len(tables.together),
    )


async def request_s(session: aiohttp.ClientSession, endpoint: Endpoint, times: StepTime) -> float:
    """Seconds of a request that are no step: gateway, HTTP, template, tokenizer, what lies between processes.

    The median over short questions that nobody else disturbs, each all new but for its beginning; they go to
    both replicas, which know the template afterwards.
    """
    found = []
    for number in range(_NUM_PROBES):
        text = f"{number} {WORDS[number % len(WORDS)]}"
        body = {"messages": [{"role": "user", "content": text}], "max_tokens": 1, "temperature": 0}
        exchange = await ask(session, endpoint, body, affinity=f"probe-{number}")
        if exchange.error:
            raise RuntimeError(f"a probe failed: {exchange.error}")
        num_new = exchange.prompt_tokens - exchange.cached_tokens
        step_s = times.step_s(0, num_new, 0, num_new * (exchange.cached_tokens + (num_new + 1) / 2))
        found.append(exchange.first_s - exchange.sent_s - step_s)
    return max(0.0, statistics.median(found))


def described(fit_: Fit, overhead_s: float) -> str:
    """One paragraph of Markdown."""
    times = fit_.times
    return (
        f"{fit_.num_steps:,} steps measured before and after, alone and on two engines side by side. Alone a "
        f"step takes {1e3 * times.base_s:.2f} ms + {1e3 * times.decode_s:.2f} ms a decode + "
        f"{1e6 * times.context_s:.2f} us a token that decodes attend to; with prompts "
        f"{1e3 * times.prefill_step_s:.2f} ms more + {1e3 * times.prefill_s:.3f} ms a prompt token + "
        f"{1e6 * times.attention_s:.2f} us a token that those attend to; median error "
        f"{times.relative_error:.1%}. Beside another engine a step takes {fit_.slowdown:.2f} times as long, "
        f"median error {fit_.beside_error:.1%}. A request takes {1e3 * overhead_s:.1f} ms besides its steps."
    )


def errors_by_size(steps: Sequence[MeasuredStep], times: StepTime) -> list[tuple[str, int, float]]:
    """(kind of step, how many, median of fitted over measured) for steps of several sizes."""
    kinds: dict[str, Callable[[MeasuredStep], bool]] = {
        "decodes only": lambda step: step.num_prefill_tokens == 0,
        "prompts to 64 tokens": lambda step: 0 < step.num_prefill_tokens <= 64,
        "to 256": lambda step: 64 < step.num_prefill_tokens <= 256,
        "longer": lambda step: step.num_prefill_tokens > 256,
    }
    rows = []
    for name, is_kind in kinds.items():
        ratios = [times.predicted_s(step) / step.step_s for step in steps if is_kind(step)]
        if ratios:
            rows.append((name, len(ratios), statistics.median(ratios)))
    return rows
