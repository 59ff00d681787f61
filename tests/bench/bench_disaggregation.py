"""Measure what prefill costs those who read: ``python -m tests.bench.bench_disaggregation``.

Two replicas on one thread each, behind a gateway, once both doing everything and once with roles. Readers
stream long answers to short prompts, one after the other, while other users keep asking with long prompts
that nobody has seen. The latency between two tokens of the readers is taken where they are; so is the time
that the others wait for their first token. Needs the embedded model (``make model``).
"""

from __future__ import annotations

import argparse
import asyncio
import itertools
import json
import random
import statistics
import tempfile
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import aiohttp

from tests.support.installation import MODEL, Installation
from tests.support.split_installation import split_installation

ROLES: dict[str, list[str]] = {"both": ["both", "both"], "split": ["prefill", "decode"]}
WORDS = ("fire", "night", "river", "stone", "lamp", "winter", "garden", "letter", "window", "bread", "paper")


@dataclass
class Measured:
    """Seconds. ``gaps`` between tokens of readers, ``first`` until the first token of a long prompt."""

    gaps: list[float] = field(default_factory=list)
    first: list[float] = field(default_factory=list)
    num_failed: int = 0


class Load:
    """Readers and askers of one run, until its time is up."""

    def __init__(self, installation: Installation, options: argparse.Namespace) -> None:
        account = installation.account
        self._url = f"{installation.url}/client/v4/accounts/{account.account_id}/ai/v1/chat/completions"
        self._headers = {"authorization": f"Bearer {account.api_token}"}
        self._options = options
        self._rng = random.Random(options.seed)
        self._until = time.monotonic() + options.warm_up_s + options.seconds
        self._counts_from = time.monotonic() + options.warm_up_s
        self.measured = Measured()

    async def run(self) -> Measured:
        async with aiohttp.ClientSession(timeout=aiohttp.ClientTimeout(total=None)) as session:
            readers = (self._read(session, number) for number in range(self._options.readers))
            askers = (self._ask(session, number) for number in range(self._options.askers))
            await asyncio.gather(*readers, *askers)
        return self.measured

    async def _read(self, session: aiohttp.ClientSession, number: int) -> None:
        while time.monotonic() < self._until:
            text = f"Tell me a long story about {self._rng.choice(WORDS)} and {self._rng.choice(WORDS)}."
            times = await self._stream(session, text, 96, f"reader-{number}")
            pairs = itertools.pairwise(times)
            self.measured.gaps += [b - a for a, b in pairs if a >= self._counts_from]

    async def _ask(self, session: aiohttp.ClientSession, number: int) -> None:
        turn = 0
        while time.monotonic() < self._until:
            turn += 1
            words = " ".join(self._rng.choice(WORDS) for _ in range(self._options.prompt_tokens - 40))
            started_at = time.monotonic()
            times = await self._stream(session, words, 4, f"asker-{number}-{turn}")
            if times and started_at >= self._counts_from:
                self.measured.first.append(times[0] - started_at)

    async def _stream(
        self, session: aiohttp.ClientSession, text: str, max_tokens: int, key: str
    ) -> list[float]:
        """When each chunk with text came."""
        body: dict[str, Any] = {
            "model": MODEL,
            "messages": [{"role": "user", "content": text}],
            "stream": True,
            "temperature": 0.7,
            "max_tokens": max_tokens,
        }
        headers = {**self._headers, "x-session-affinity": key}
        async with session.post(self._url, json=body, headers=headers) as response:
            if response.status != 200:
                self.measured.num_failed += 1
                return []
            return [time.monotonic() async for line in response.content if _has_text(line)]


def _has_text(line: bytes) -> bool:
    return line.startswith(b'data: {"') and b'"content":"' in line and b'"content":""' not in line


def percentile(values: Sequence[float], share: float) -> float:
    """In milliseconds."""
    ordered = sorted(values)
    return ordered[min(int(len(ordered) * share), len(ordered) - 1)] * 1000 if ordered else float("nan")


def measure(name: str, options: argparse.Namespace) -> dict[str, float]:
    """One run on an installation of its own."""
    with tempfile.TemporaryDirectory() as home:
        device = {"device": "cpu", "threads": 1}
        with split_installation(Path(home), ROLES[name], device=device) as installation:
            measured = asyncio.run(Load(installation, options).run())
    return {
        "gaps": len(measured.gaps),
        "p50_ms": percentile(measured.gaps, 0.5),
        "p90_ms": percentile(measured.gaps, 0.9),
        "p99_ms": percentile(measured.gaps, 0.99),
        "prompts": len(measured.first),
        "first_p50_ms": percentile(measured.first, 0.5),
        "failed": measured.num_failed,
    }


def main() -> None:
    """Run each form ``--rounds`` times, in turn, and print the medians."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n\n", maxsplit=1)[0])
    parser.add_argument("--readers", type=int, default=3)
    parser.add_argument("--askers", type=int, default=2)
    parser.add_argument("--prompt-tokens", type=int, default=1200)
    parser.add_argument("--seconds", type=float, default=40.0)
    parser.add_argument("--warm-up-s", type=float, default=5.0)
    parser.add_argument("--rounds", type=int, default=2)
    parser.add_argument("--seed", type=int, default=7)
    options = parser.parse_args()
    rounds: dict[str, list[dict[str, float]]] = {name: [] for name in ROLES}
    for _ in range(options.rounds):
        for name in ROLES:
            rounds[name].append(measure(name, options))
            print(name, json.dumps(rounds[name][-1]), flush=True)
    medians = {
        name: {key: statistics.median(run[key] for run in runs) for key in runs[0]}
        for name, runs in rounds.items()
    }
    for name, row in medians.items():
        print(f"{name:6}", "  ".join(f"{key} {value:.0f}" for key, value in row.items()))
    print(
        f"p90 between tokens: {medians['both']['p90_ms'] / medians['split']['p90_ms']:.1f} times better split"
    )


if __name__ == "__main__":
    main()
