"""What guessing gains: ``python -m tests.bench.bench_speculation``.

Two workloads on the embedded model, greedy, one sequence at a time: files of code that are given back, as
when an agent edits them (shown twice before, as so small a model copies well only then), and prose. Each
answer is made without and with guesses, in turns; the two must be equal, token for token. Figures are medians
over the rounds, of tokens for a second of CPU time, so that a busy machine does not change them much.
"""

from __future__ import annotations

import argparse
import itertools
import json
import os
import statistics
import sys
import time
from dataclasses import asdict, dataclass
from pathlib import Path

from backend.config import (
    BackendConfig,
    CacheConfig,
    DeviceConfig,
    ModelSource,
    SchedulerConfig,
    SpeculationConfig,
)
from backend.engine.client import ENGINE_ENVIRONMENT
from backend.engine.engine import Engine
from backend.engine.messages import SamplingParams, SequenceRequest
from backend.engine.runner import ModelRunner
from backend.text.model_text import load_model_text
from embergate.layout import DataLayout

CONTEXT = 2048
ANSWER = 200
CODE = '''class Account:
    """Money of one customer, in cents."""

    def __init__(self, owner, balance=0):
        self.owner = owner
        self.balance = balance
        self.entries = []

    def deposit(self, amount):
        if amount <= 0:
            raise ValueError("amount must be positive")
        self.balance += amount
        self.entries.append(("deposit", amount))

    def withdraw(self, amount):
        if amount > self.balance:
            raise ValueError("not enough money")
        self.balance -= amount
        self.entries.append(("withdraw", amount))

    def report(self):
        for kind, amount in self.entries:
            print(kind, amount)
'''
EDITS = (
    "with the method report renamed to show_entries",
    "with cents in place of amount",
    "with a method close at its end",
)
PROSE = (
    "Write a letter to a friend about a walk by the sea.",
    "Explain how bread is made, to somebody who has never baked.",
    "Tell a story about a clockmaker who loses his hearing.",
)


@dataclass(frozen=True, slots=True)
class Result:
    """One workload: tokens for a second of CPU time without and with guesses; the share of right guesses."""

    form: str
    workload: str
    plain_tokens_per_s: float
    guessing_tokens_per_s: float
    right_share: float
    tokens_per_step: float

    @property
    def gain(self) -> float:
        return self.guessing_tokens_per_s / self.plain_tokens_per_s


class Contestant:
    """An engine with or without guesses, on a runner that both share."""

    def __init__(self, runner: ModelRunner, config: BackendConfig) -> None:
        self.engine = Engine(runner, config, clock_s=time.monotonic, draw_seed=itertools.count().__next__)
        self._ids = itertools.count()
        self.decode_s = 0.0
        self.num_decoded = 0
        self.num_steps = 0

    def answer(self, prompt: list[int]) -> list[int]:
        """The answer; what came after its first token counts as decoding."""
        sequence_id = next(self._ids)
        sampling = SamplingParams(max_tokens=ANSWER, temperature=0.0, ignore_eos=True)
        request = SequenceRequest(
            sequence_id=sequence_id,
            prompt_token_ids=prompt,
            sampling=sampling,
            cache_salt=str(sequence_id).encode(),
        )
        self.engine.submit(request)
        tokens: list[int] = []
        began = 0.0
        while self.engine.has_work:
            self.engine.step()
            for output in self.engine.take_outputs():
                tokens += output.token_ids
                if not began and tokens:
                    began, first, steps = time.process_time(), len(tokens), self.engine.stats().num_steps
        self.decode_s += time.process_time() - began
        self.num_decoded += len(tokens) - first
        self.num_steps += self.engine.stats().num_steps - steps
        return tokens


def measure(form: str, checkpoint: Path, rounds: int, draft: int, match: int) -> list[Result]:
    config = BackendConfig(
        replica_id="bench",
        model=ModelSource(path=str(checkpoint), served_as="bench", max_model_len=CONTEXT),
        cache=CacheConfig(num_blocks=512),
        scheduler=SchedulerConfig(max_running=8),
        device=DeviceConfig(device="cpu", threads=1),
    )
    guessing = SpeculationConfig(enabled=True, max_draft_tokens=draft, match_tokens=match)
    runner = ModelRunner.load(config)
    text = load_model_text(checkpoint, cache_chars=0, vocab_size=runner.info.vocab_size)
    results = []
    twice = f"{CODE}\n# The same file again:\n\n{CODE}\n"
    edits = [f"{twice}# The same file, {edit}:\n\n{CODE[:60]}" for edit in EDITS]
    prose = [f"<|im_start|>user\n{prompt}<|im_end|>\n<|im_start|>assistant\n" for prompt in PROSE]
    for workload, prompts in (("edits of code", edits), ("prose", prose)):
        rates: dict[bool, list[float]] = {False: [], True: []}
        for round_number in range(rounds):
            sides = {False: Contestant(runner, config)}
            sides[True] = Contestant(runner, _with(config, guessing))
            for prompt in (text.encode_text(prompt) for prompt in prompts):
                answers = {is_guessing: sides[is_guessing].answer(prompt) for is_guessing in (False, True)}
                assert answers[False] == answers[True], "guessing changed an answer"
            for is_guessing, side in sides.items():
                rates[is_guessing].append(side.num_decoded / side.decode_s)
            print(f"{form}, {workload}: round {round_number + 1} of {rounds}", file=sys.stderr, flush=True)
        stats = sides[True].engine.stats()
        right = stats.num_right_draft_tokens / max(stats.num_draft_tokens, 1)
        plain, quick = (statistics.median(rates[is_guessing]) for is_guessing in (False, True))
        results.append(
            Result(form, workload, plain, quick, right, sides[True].num_decoded / sides[True].num_steps)
        )
    return results


def _with(config: BackendConfig, speculation: SpeculationConfig) -> BackendConfig:
    fields = {name: getattr(config, name) for name in config.__struct_fields__}
    return BackendConfig(**{**fields, "speculation": speculation})


def table_of(results: list[Result]) -> str:
    lines = [
        "| form | workload | tokens per CPU second | with guesses | gain | guesses right | tokens a step |",
        "|---|---|---|---|---|---|---|",
    ]
    lines += [
        f"| {r.form} | {r.workload} | {r.plain_tokens_per_s:.1f} | {r.guessing_tokens_per_s:.1f} |"
        f" {r.gain:.2f}x | {r.right_share:.0%} | {r.tokens_per_step:.2f} |"
        for r in results
    ]
    return "\n".join(lines)


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--forms", default="kimi,llama")
    parser.add_argument("--draft", type=int, default=SpeculationConfig().max_draft_tokens)
    parser.add_argument("--match", type=int, default=SpeculationConfig().match_tokens)
    parser.add_argument("--json", type=Path, help="write the figures here too")
    options = parser.parse_args()
    if not ENGINE_ENVIRONMENT.keys() <= os.environ.keys():
        # OpenMP reads its environment when it is loaded, which is before this line.
        command = [sys.executable, "-m", "tests.bench.bench_speculation", *sys.argv[1:]]
        os.execve(sys.executable, command, {**ENGINE_ENVIRONMENT, **os.environ})
    layout = DataLayout(Path(os.environ.get("EMBERGATE_DATA_DIR", ".embergate")).resolve())
    results: list[Result] = []
    for form in options.forms.split(","):
        checkpoint = layout.embedded_checkpoint(form)
        results += measure(form, checkpoint, options.rounds, options.draft, options.match)
    print(table_of(results))
    if options.json:
        options.json.write_text(json.dumps([asdict(result) for result in results], indent=2) + "\n")
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
