"""Measure the engine beside llama.cpp on the same GGUF, in one run: ``python -m tests.bench.bench_engine``.

Both forms of the embedded model run through the whole engine (scheduler, prefix cache, sampler) in this
process; llama.cpp runs as its own server, reached over HTTP. All use the same threads, greedy sampling and
the same prompts of random tokens. Rounds alternate between the engines; figures are medians, ratios are ours
to llama.cpp's.
"""

from __future__ import annotations

import argparse
import itertools
import json
import os
import random
import statistics
import sys
import time
from collections import defaultdict
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Protocol

from backend.config import BackendConfig, CacheConfig, DeviceConfig, ModelSource, SchedulerConfig
from backend.engine.client import ENGINE_ENVIRONMENT
from backend.engine.engine import Engine
from backend.engine.messages import SamplingParams, SequenceRequest
from backend.engine.runner import ModelRunner
from embergate.embedded_model import GGUF_NAME
from embergate.layout import DataLayout
from tests.bench.engine_peer import Timeline, llama_server
from tests.bench.engine_profile import timed_kernels

PEER = "llama.cpp Q4_1"
PREFILL_LENGTHS = (512, 2048)
BATCHES = (1, 4, 8)
DECODE_TOKENS = 64
SHORT_PROMPT = 24
TTFT_PROMPT = 2000
TURN = 8
CONTEXT = 2304

AIMS = {"prefill 512": 1.5, "prefill 2048": 1.5, "decode b1": 0.35, "decode b8": 0.7}
"""The least ratio to llama.cpp's tokens per second."""
WARM_SHARE = "warm / cold"
MAX_WARM_SHARE = 0.15


class Contestant(Protocol):
    """Something that answers prompts."""

    def complete_together(self, prompts: Sequence[Sequence[int]], num_tokens: int) -> list[Timeline]: ...

    def complete(self, prompt: Sequence[int], num_tokens: int, *, use_cache: bool = False) -> Timeline: ...


class OwnEngine:
    """The engine in this process."""

    def __init__(self, checkpoint: Path, threads: int) -> None:
        config = BackendConfig(
            replica_id="bench",
            model=ModelSource(path=str(checkpoint), served_as="bench", max_model_len=CONTEXT),
            cache=CacheConfig(num_blocks=max(BATCHES) * CONTEXT // 16),
            scheduler=SchedulerConfig(max_running=max(BATCHES)),
            device=DeviceConfig(device="cpu", threads=threads),
        )
        start = time.perf_counter()
        self.runner = ModelRunner.load(config)
        self.load_s = time.perf_counter() - start
        self._engine = Engine(
            self.runner, config, clock_s=time.monotonic, draw_seed=itertools.count().__next__
        )
        self._ids = itertools.count()

    def complete(self, prompt: Sequence[int], num_tokens: int, *, use_cache: bool = False) -> Timeline:
        salt = "shared" if use_cache else f"once-{next(self._ids)}"
        return self._run([prompt], num_tokens, salt)[0]

    def complete_together(self, prompts: Sequence[Sequence[int]], num_tokens: int) -> list[Timeline]:
        return self._run(prompts, num_tokens, f"once-{next(self._ids)}")

    def _run(self, prompts: Sequence[Sequence[int]], num_tokens: int, salt: str) -> list[Timeline]:
        sent = time.perf_counter()
        arrivals: dict[int, list[float]] = {}
        cached: dict[int, int] = {}
        for prompt in prompts:
            sequence_id = next(self._ids)
            arrivals[sequence_id] = []
            sampling = SamplingParams(max_tokens=num_tokens, temperature=0.0, ignore_eos=True)
            self._engine.submit(
                SequenceRequest(
                    sequence_id=sequence_id,
                    prompt_token_ids=list(prompt),
                    sampling=sampling,
                    cache_salt=salt.encode(),
                )
            )
        while self._engine.has_work:
            self._engine.step()
            now = time.perf_counter()
            for output in self._engine.take_outputs():
                assert output.finish_reason in (None, "length"), output
                arrivals[output.sequence_id] += [now] * len(output.token_ids)
                cached[output.sequence_id] = output.cached_prompt_tokens
        return [Timeline(sent, tuple(times), cached[key]) for key, times in arrivals.items()]


class Results:
    """Figures by measurement and contestant, over all rounds."""

    def __init__(self) -> None:
        self._figures: dict[str, dict[str, list[float]]] = defaultdict(lambda: defaultdict(list))

    def add(self, measurement: str, contestant: str, value: float) -> None:
        self._figures[measurement][contestant].append(value)

    def median(self, measurement: str, contestant: str) -> float | None:
        values = self._figures[measurement][contestant]
        return statistics.median(values) if values else None

    def table(self, contestants: Sequence[str]) -> str:
        lines = ["| | " + " | ".join(contestants) + " |", "|---" * (len(contestants) + 1) + "|"]
        for measurement in self._figures:
            peer = self.median(measurement, PEER)
            cells = []
            for contestant in contestants:
                value = self.median(measurement, contestant)
                if value is None:
                    cells.append("-")
                elif measurement == WARM_SHARE:
                    cells.append(f"{value:.1%}")
                elif peer is None or contestant == PEER:
                    cells.append(f"{value:,.1f}")
                else:
                    cells.append(f"{value:,.1f} ({value / peer:.2f}x)")
            lines.append(f"| {measurement} | " + " | ".join(cells) + " |")
        return "\n".join(lines)

    def medians(self) -> dict[str, dict[str, float]]:
        return {
            measurement: {name: statistics.median(values) for name, values in figures.items() if values}
            for measurement, figures in self._figures.items()
        }


def measure(name: str, contestant: Contestant, rng: random.Random, results: Results) -> None:
    """One round of all measurements."""

    def prompt(length: int) -> list[int]:
        return [rng.randrange(100, 49_000) for _ in range(length)]

    for length in PREFILL_LENGTHS:
        timeline = contestant.complete(prompt(length), 1)
        results.add(f"prefill {length} (tokens/s)", name, length / (timeline.arrivals[0] - timeline.sent))
    for batch in BATCHES:
        timelines = contestant.complete_together([prompt(SHORT_PROMPT) for _ in range(batch)], DECODE_TOKENS)
        # Only while all of them decode: from the last first token to the first last token.
        start = max(timeline.arrivals[0] for timeline in timelines)
        end = min(timeline.arrivals[-1] for timeline in timelines)
        count = sum(sum(start < at <= end for at in timeline.arrivals) for timeline in timelines)
        results.add(f"decode b{batch} (tokens/s)", name, count / (end - start))
    history = prompt(TTFT_PROMPT)
    cold = contestant.complete(history, 1, use_cache=True)
    warm = contestant.complete([*history, *prompt(TURN)], 1, use_cache=True)
    cold_ms, warm_ms = ((line.arrivals[0] - line.sent) * 1e3 for line in (cold, warm))
    results.add(f"TTFT {TTFT_PROMPT} cold (ms)", name, cold_ms)
    results.add(f"TTFT {TTFT_PROMPT} + {TURN} warm (ms)", name, warm_ms)
    results.add(WARM_SHARE, name, warm_ms / cold_ms)


def profile(name: str, engine: OwnEngine, rng: random.Random) -> None:
    """Print where the time of three kinds of step goes."""
    cases: list[tuple[str, Callable[[], object], int]] = []
    for batch in (1, 8):
        prompts = [[rng.randrange(100, 49_000)] for _ in range(batch)]
        cases.append((f"decode b{batch}", lambda p=prompts: engine.complete_together(p, 33), 33))  # type: ignore[misc]
    long = [rng.randrange(100, 49_000) for _ in range(512)]
    cases.append(("prefill 512", lambda: engine.complete(long, 1), 1))
    for what, run, num_steps in cases:
        with timed_kernels() as times:
            start = time.perf_counter()
            run()
            total = time.perf_counter() - start
        print(f"  {name}, {what}: {total / num_steps * 1e3:.1f} ms a step")
        print("\n".join(times.lines(total, num_steps)))


def judge(results: Results, contestants: Sequence[str]) -> list[str]:
    """The aims that were missed."""
    missed = []
    for name in contestants:
        if name == PEER:
            continue
        for aim, factor in AIMS.items():
            measurement = f"{aim} (tokens/s)"
            ours, peer = results.median(measurement, name), results.median(measurement, PEER)
            if ours is not None and peer is not None and ours < factor * peer:
                missed.append(f"{name}: {aim} is {ours / peer:.2f}x of llama.cpp's, the aim is {factor}x")
        share = results.median(WARM_SHARE, name)
        if share is not None and share >= MAX_WARM_SHARE:
            missed.append(f"{name}: warm TTFT is {share:.0%} of cold, the aim is under {MAX_WARM_SHARE:.0%}")
    return missed


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--forms", default="kimi,llama")
    parser.add_argument("--without-peer", action="store_true", help="leave llama.cpp out")
    parser.add_argument("--json", type=Path, help="write the medians here too")
    options = parser.parse_args()
    if not ENGINE_ENVIRONMENT.keys() <= os.environ.keys():
        # OpenMP reads its environment when it is loaded, which is before this line.
        command = [sys.executable, "-m", "tests.bench.bench_engine", *sys.argv[1:]]
        os.execve(sys.executable, command, {**ENGINE_ENVIRONMENT, **os.environ})
    layout = DataLayout(Path(os.environ.get("EMBERGATE_DATA_DIR", ".embergate")).resolve())
    contestants: dict[str, Contestant] = {}
    engines: dict[str, OwnEngine] = {}
    for form in options.forms.split(","):
        engines[form] = OwnEngine(layout.embedded_checkpoint(form), options.threads)
        info = engines[form].runner.info
        print(f"{form}: loaded in {engines[form].load_s:.1f} s, native kernels {info.is_native}", flush=True)
    contestants.update(engines)
    results = Results()
    if options.without_peer:
        run_rounds(contestants, options.rounds, results)
    else:
        with llama_server(layout.embedded_dir / GGUF_NAME, options.threads, max(BATCHES), CONTEXT) as peer:
            contestants[PEER] = peer
            run_rounds(contestants, options.rounds, results)
    print(f"\nSmolLM2-135M, {options.threads} threads, medians of {options.rounds} rounds\n")
    print(results.table(list(contestants)))
    print("\nWhere the time of a step goes:")
    for form, engine in engines.items():
        profile(form, engine, random.Random(7))
    if options.json:
        options.json.write_text(json.dumps(results.medians(), indent=2) + "\n")
    missed = judge(results, list(contestants))
    print("\n" + ("\n".join(f"MISSED {line}" for line in missed) if missed else "All aims are met."))
    return 1 if missed else 0


def run_rounds(contestants: dict[str, Contestant], num_rounds: int, results: Results) -> None:
    for contestant in contestants.values():
        contestant.complete([5] * 64, 4)  # warm up threads and caches
    for round_number in range(num_rounds):
        for name, contestant in contestants.items():
            print(f"round {round_number + 1}: {name}", flush=True)
            measure(name, contestant, random.Random(round_number), results)


if __name__ == "__main__":
    raise SystemExit(main())
