"""Measure how long first and further tokens are waited for: ``python -m tests.bench.bench_scheduling``.

Users share one engine in this process, on the embedded model or (``--simulate``) on a model that computes
nothing and takes as long as it is told, in virtual time, so that policies can be compared exactly.

chat
    users come a quarter of a second apart; each asks again as soon as it has its answer.
burst
    as many users ask at once, while two readers are in the middle of long answers.
agent
    two users who chat, and one whose prompt is long.
"""

from __future__ import annotations

import argparse
import itertools
import os
import random
import statistics
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path

import torch
from torch import Tensor

from backend.config import BackendConfig, CacheConfig, DeviceConfig, ModelSource, SchedulerConfig
from backend.engine.client import ENGINE_ENVIRONMENT
from backend.engine.engine import Engine
from backend.engine.messages import SamplingParams, SequenceRequest
from backend.engine.runner import ModelRunner
from backend.engine.step import ShouldStop, StepPlan
from backend.engine.step_runner import StepRunner
from embergate.layout import DataLayout

CONTEXT = 4096
ANSWER = 48
SHORT = (60, 180)
LONG = 2000
NUM_PARTS = 60


class Clock:
    """Monotonic seconds."""

    def now(self) -> float:
        return time.monotonic()

    def wait(self, seconds: float) -> None:
        time.sleep(seconds)


class VirtualClock(Clock):
    """Moves when it is waited for."""

    def __init__(self) -> None:
        self._now = 0.0

    def now(self) -> float:
        return self._now

    def wait(self, seconds: float) -> None:
        self._now += max(seconds, 1e-6)


@dataclass(frozen=True, slots=True)
class Costs:
    """Seconds that a step takes: for itself, for each decode, for each prompt token."""

    step_s: float
    decode_s: float
    prefill_s: float


@dataclass(frozen=True, slots=True)
class SimulatedInfo:
    vocab_size: int = 64
    max_model_len: int = CONTEXT
    eos_token_ids: tuple[int, ...] = ()
    kv_bytes_per_token: int = 1024
    kv_memory_bytes: int = 1 << 30
    memory_bytes: int = 1 << 34
    device: str = "none"
    has_vision: bool = False


class SimulatedRunner:
    """Takes time, as a model would."""

    def __init__(self, costs: Costs, clock: Clock) -> None:
        self.info = SimulatedInfo()
        self._costs, self._clock = costs, clock

    kv_blocks = None

    def allocate_kv(self, num_blocks: int, block_size: int) -> None:
        pass

    def execute(self, plan: StepPlan, should_stop: ShouldStop | None = None) -> Tensor:
        decodes = sum(len(chunk.token_ids) == 1 for chunk in plan.chunks)
        costs = self._costs
        total = costs.step_s + costs.decode_s * decodes + costs.prefill_s * (plan.num_tokens - decodes)
        for _ in range(NUM_PARTS):
            self._clock.wait(total / NUM_PARTS)
            if should_stop is not None:
                should_stop()
        return torch.zeros(sum(chunk.needs_logits for chunk in plan.chunks), self.info.vocab_size)


@dataclass(slots=True)
class User:
    """Asks ``rounds`` times, each time when the answer before is complete; the first time at ``starts_s``."""

    kind: str
    starts_s: float
    rounds: int
    prompt: tuple[int, int]
    answer: int = ANSWER


@dataclass(slots=True)
class Answer:
    """When one prompt was sent, and when its tokens came."""

    user: User
    sent_s: float
    arrivals_s: list[float] = field(default_factory=list)


def chat(users: int) -> list[User]:
    return [User("short", index * 0.25, 2, SHORT) for index in range(users)]


def burst(users: int) -> list[User]:
    return [User("reader", 0.0, 1, SHORT, 160) for _ in range(2)] + [
        User("short", 1.0, 1, SHORT) for _ in range(users)
    ]


def agent(users: int) -> list[User]:
    del users
    return [User("short", 0.1 + index * 0.5, 3, SHORT) for index in range(2)] + [
        User("long", 0.4, 1, (LONG, LONG))
    ]


SCENARIOS: dict[str, Callable[[int], list[User]]] = {"chat": chat, "burst": burst, "agent": agent}


class Run:
    """One scenario on one engine."""

    def __init__(self, engine: Engine, clock: Clock, users: Sequence[User], seed: int) -> None:
        self._engine, self._clock = engine, clock
        self._rng = random.Random(seed)
        self._ids = itertools.count(engine.stats().num_requests)
        self._began_s = clock.now()
        self._due = [(user.starts_s, user, user.rounds) for user in users]
        self._open: dict[int, tuple[Answer, int]] = {}
        self.answers: list[Answer] = []

    def finish(self) -> list[Answer]:
        """Serve until every answer is complete."""
        while self._due or self._engine.has_work:
            self._look_up()
            if self._engine.has_work:
                self._engine.step(self._look_up)
                self._collect()
            else:
                self._clock.wait(max(0.0, min(due for due, _, _ in self._due) - self._elapsed()))
        return self.answers

    def _elapsed(self) -> float:
        return self._clock.now() - self._began_s

    def _look_up(self) -> None:
        now = self._elapsed()
        for entry in [entry for entry in self._due if entry[0] <= now]:
            self._due.remove(entry)
            due_s, user, rounds = entry
            answer, sequence_id = Answer(user, due_s), next(self._ids)
            self.answers.append(answer)
            self._open[sequence_id] = answer, rounds
            vocabulary = self._engine.info.vocab_size
            length = self._rng.randint(*user.prompt)
            self._engine.submit(
                SequenceRequest(
                    sequence_id=sequence_id,
                    prompt_token_ids=[self._rng.randrange(vocabulary) for _ in range(length)],
                    sampling=SamplingParams(max_tokens=user.answer, temperature=0.0, ignore_eos=True),
                    cache_salt=str(sequence_id).encode(),
                )
            )

    def _collect(self) -> None:
        now = self._elapsed()
        for output in self._engine.take_outputs():
            assert output.finish_reason in (None, "length"), output.message
            answer, rounds = self._open[output.sequence_id]
            answer.arrivals_s += [now] * len(output.token_ids)
            if output.finish_reason is not None and rounds > 1:
                self._due.append((now, answer.user, rounds - 1))


def report(name: str, answers: Sequence[Answer]) -> list[str]:
    """Table rows, one for each kind of user."""
    rows = []
    end = max(answer.arrivals_s[-1] for answer in answers)
    rate = sum(len(answer.arrivals_s) for answer in answers) / end
    for kind in dict.fromkeys(answer.user.kind for answer in answers):
        those = [answer for answer in answers if answer.user.kind == kind]
        firsts = sorted(answer.arrivals_s[0] - answer.sent_s for answer in those)
        gaps = sorted(b - a for answer in those for a, b in itertools.pairwise(answer.arrivals_s))
        seconds = (statistics.median(firsts), statistics.mean(firsts), firsts[-1])
        milliseconds = (statistics.median(gaps), gaps[len(gaps) * 95 // 100], gaps[-1])
        cells = [*(f"{value:.2f}" for value in seconds), *(f"{value * 1e3:.0f}" for value in milliseconds)]
        rows.append(f"| {name} | {kind} | {' | '.join(cells)} | {rate:.0f} |")
    return rows


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--users", type=int, default=8)
    parser.add_argument("--form", default="kimi")
    parser.add_argument("--scenarios", default=",".join(SCENARIOS))
    parser.add_argument("--max-mixed-step-s", type=float, default=SchedulerConfig().max_mixed_step_s)
    parser.add_argument(
        "--simulate", metavar="STEP,DECODE,PREFILL", help="milliseconds of a step, a decode, a prompt token"
    )
    options = parser.parse_args()
    if not ENGINE_ENVIRONMENT.keys() <= os.environ.keys():
        # OpenMP reads its environment when it is loaded, which is before this line.
        command = [sys.executable, "-m", "tests.bench.bench_scheduling", *sys.argv[1:]]
        os.execve(sys.executable, command, {**ENGINE_ENVIRONMENT, **os.environ})
    layout = DataLayout(Path(os.environ.get("EMBERGATE_DATA_DIR", ".embergate")).resolve())
    config = BackendConfig(
        replica_id="bench",
        model=ModelSource(
            path=str(layout.embedded_checkpoint(options.form)), served_as="bench", max_model_len=CONTEXT
        ),
        cache=CacheConfig(num_blocks=2048),
        scheduler=SchedulerConfig(max_mixed_step_s=options.max_mixed_step_s),
        device=DeviceConfig(device="cpu", threads=options.threads),
    )
    clock, runner = Clock(), None
    if options.simulate:
        clock = VirtualClock()
        runner = SimulatedRunner(Costs(*(float(part) / 1e3 for part in options.simulate.split(","))), clock)
    loaded: StepRunner = runner or ModelRunner.load(config)
    print("| scenario | user | TTFT p50 s | mean | max | token p50 ms | p95 | max | tokens/s |")
    print("|---" * 9 + "|", flush=True)
    for name in options.scenarios.split(","):
        engine = Engine(loaded, config, clock_s=clock.now, draw_seed=itertools.count().__next__)
        Run(engine, clock, [User("warm", 0.0, 1, (512, 512), 8)], 0).finish()
        answers = Run(engine, clock, SCENARIOS[name](options.users), 1).finish()
        print("\n".join(report(name, answers)), flush=True)
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
