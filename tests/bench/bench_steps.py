"""Measure how long the engine's steps take: ``python -m tests.bench.bench_steps --out steps.jsonl``.

Two engines with the embedded model run side by side, one thread each, as two replicas do, and decode beside
prompts of many lengths. Each step becomes a line for ``embergate simulate fit``: sequences that decode,
tokens of prompts, tokens that the decodes attend to, seconds.
"""

from __future__ import annotations

import argparse
import itertools
import json
import os
import random
import subprocess
import sys
import time
from pathlib import Path

from torch import Tensor

from backend.config import BackendConfig, CacheConfig, DeviceConfig, ModelSource, SchedulerConfig
from backend.engine.client import ENGINE_ENVIRONMENT
from backend.engine.engine import Engine
from backend.engine.messages import SamplingParams, SequenceRequest
from backend.engine.runner import ModelInfo, ModelRunner
from backend.engine.step import ShouldStop, StepPlan
from embergate.layout import DataLayout
from simulator.step_time import attended

CONTEXT = 2048
NUM_BLOCKS = 2048


class Notebook:
    """A model runner that remembers what its last step was asked to compute."""

    def __init__(self, runner: ModelRunner) -> None:
        self._runner = runner
        self.plan = StepPlan(())

    @property
    def info(self) -> ModelInfo:
        return self._runner.info

    kv_blocks = None

    def allocate_kv(self, num_blocks: int, block_size: int) -> None:
        self._runner.allocate_kv(num_blocks, block_size)

    def execute(self, plan: StepPlan, should_stop: ShouldStop | None = None) -> Tensor:
        self.plan = plan
        return self._runner.execute(plan, should_stop)


class StepBench:
    """One engine that is fed at random until the time is over."""

    def __init__(self, checkpoint: Path, seed: int) -> None:
        config = BackendConfig(
            replica_id="steps",
            model=ModelSource(path=str(checkpoint), served_as="steps", max_model_len=CONTEXT),
            cache=CacheConfig(num_blocks=NUM_BLOCKS),
            scheduler=SchedulerConfig(max_running=32),
            device=DeviceConfig(device="cpu", threads=1),
        )
        self._notebook = Notebook(ModelRunner.load(config))
        self._ids = itertools.count(1)
        self._rng = random.Random(seed)
        self._engine = Engine(
            self._notebook, config, clock_s=time.monotonic, draw_seed=itertools.count().__next__
        )

    def run(self, seconds: float) -> list[dict[str, float]]:
        """Steps that were computed meanwhile, the first ones (caches, threads) left out."""
        self._submit(64, 4)
        while self._engine.has_work:
            self._engine.step()
        steps: list[dict[str, float]] = []
        deadline = time.monotonic() + seconds
        while time.monotonic() < deadline:
            if self._engine.stats().num_running + self._engine.stats().num_waiting < self._rng.choice(
                (1, 2, 4, 8)
            ):
                self._submit(self._rng.choice((8, 40, 90, 180, 350, 700)), self._rng.choice((4, 12, 24, 48)))
            started = time.perf_counter()
            self._engine.step()
            took = time.perf_counter() - started
            self._engine.take_outputs()
            steps.append(self._line(took))
        return steps

    def _submit(self, num_prompt_tokens: int, num_tokens: int) -> None:
        sequence_id = next(self._ids)
        self._engine.submit(
            SequenceRequest(
                sequence_id=sequence_id,
                prompt_token_ids=[self._rng.randrange(100, 49_000) for _ in range(num_prompt_tokens)],
                sampling=SamplingParams(max_tokens=num_tokens, temperature=0.0, ignore_eos=True),
                cache_salt=str(sequence_id).encode(),
            )
        )

    def _line(self, step_s: float) -> dict[str, float]:
        plan = self._notebook.plan
        decodes = [chunk for chunk in plan.chunks if chunk.is_decode]
        prefills = [chunk for chunk in plan.chunks if not chunk.is_decode]
        return {
            "num_decodes": len(decodes),
            "num_prefill_tokens": plan.num_tokens - len(decodes),
            "num_context_tokens": sum(chunk.start for chunk in decodes),
            "num_attended": sum(attended(chunk.start, len(chunk.token_ids)) for chunk in prefills),
            "step_s": step_s,
        }


def measure_together(out: Path, seconds: float, num_engines: int = 2) -> int:
    """Run engines side by side, each in a process of its own, and write all their steps to ``out``.

    Returns:
        How many steps there are.
    """
    parts = [out.with_suffix(f".{number}") for number in range(num_engines)]
    command = [sys.executable, "-m", "tests.bench.bench_steps", "--seconds", str(seconds), "--engines", "1"]
    environment = {**ENGINE_ENVIRONMENT, **os.environ, "OMP_NUM_THREADS": "1"}
    engines = [
        subprocess.Popen([*command, "--seed", str(seed), "--out", str(part)], env=environment)
        for seed, part in enumerate(parts)
    ]
    codes = [engine.wait() for engine in engines]
    if any(codes):
        raise RuntimeError("an engine did not come to its end")
    text = "".join(part.read_text() for part in parts)
    out.write_text(text)
    for part in parts:
        part.unlink()
    return text.count("\n")


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--seconds", type=float, default=40.0)
    parser.add_argument("--engines", type=int, default=2)
    parser.add_argument("--seed", type=int, default=0)
    options = parser.parse_args()
    if options.engines > 1:
        print(f"{measure_together(options.out, options.seconds, options.engines):,} steps in {options.out}")
        return 0
    layout = DataLayout(Path(os.environ.get("EMBERGATE_DATA_DIR", ".embergate")).resolve())
    steps = StepBench(layout.embedded_checkpoint("kimi"), options.seed).run(options.seconds)
    options.out.write_text("".join(json.dumps(step) + "\n" for step in steps))
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
