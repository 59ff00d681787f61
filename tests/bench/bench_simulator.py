"""The simulator against reality: ``make bench-simulator``, about five minutes.

Steps of the engine are measured on this machine and fitted. Then a trace is played against a gateway with two
live replicas of the embedded model, and the same requests at the same moments, routed by the same hashing, go
through the simulator with that fit. Compared are the cached share (within 2 points) and the median time to
the first token (within 25%). The pace is chosen so that a replica is busy for a given share of the time.
"""

from __future__ import annotations

import argparse
import asyncio
import hashlib
import json
import os
import tempfile
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path

import msgspec
import numpy as np
import yaml

from embergate.dev_account import DevAccount
from loadtest.exchange import Endpoint
from loadtest.replay.command import Pace, calibrated, prompts_of, replayed
from loadtest.replay.player import Played
from loadtest.replay.prompts import Prompt
from loadtest.replay.trace import TraceEntry, read_trace, synthetic_trace
from simulator.fleet import Fleet, FleetLimits
from simulator.measures import Recorder, Targets
from simulator.policies import Rendezvous
from simulator.replica import SteppedReplica
from simulator.requests import SimulatedRequest
from simulator.step_time import ReplicaProfile, StepTime, fit, read_profile, read_steps
from tests.bench.bench_steps import NUM_BLOCKS, measure_together
from tests.support.installation import ACCOUNT_ID, MODEL, ROOT, Installation

BLOCK = 16
NUM_REPLICAS = 2
MAX_HIT_DIFFERENCE = 0.02
MAX_TTFT_DIFFERENCE = 0.25
LENGTH = 1 / 32
MOONCAKE = (
    Path(os.environ.get("EMBERGATE_SHARED_DATA") or ROOT.parent / "shared/data")
    / "mooncake/conversation_trace.jsonl"
)


@dataclass(frozen=True)
class Comparison:
    """One trace in both worlds. Shares and seconds."""

    trace: str
    num_requests: int
    duration_s: float
    live_cached: float
    simulated_cached: float
    live_ttft_p50: float
    simulated_ttft_p50: float
    live_ttft_p90: float
    simulated_ttft_p90: float

    @property
    def hit_difference(self) -> float:
        return abs(self.live_cached - self.simulated_cached)

    @property
    def ttft_difference(self) -> float:
        return abs(self.simulated_ttft_p50 / self.live_ttft_p50 - 1.0)

    @property
    def is_met(self) -> bool:
        return self.hit_difference <= MAX_HIT_DIFFERENCE and self.ttft_difference <= MAX_TTFT_DIFFERENCE


class PlayedWorkload:
    """What was played, for the simulator: the same prompts at the moments when they were really sent."""

    block_tokens = BLOCK

    def __init__(self, played: Sequence[Played], account_id: str) -> None:
        self._played = iter(enumerate(played))
        self._account_id = account_id

    def next_arrival(self) -> SimulatedRequest | None:
        for index, each in self._played:
            prompt = each.prompt
            return SimulatedRequest(
                index=index,
                arrival_s=each.due_s + each.late_s,
                account=self._account_id,
                key=prompt.entry.affinity,
                digests=[hashlib.sha256(repr(key).encode()).digest() for key in prompt.keys],
                prompt_tokens=prompt.num_tokens,
                output_tokens=prompt.max_tokens,
            )
        return None

    def next_turn(self, answered: SimulatedRequest, now_s: float) -> None:
        """An open loop."""


def simulate(
    played: Sequence[Played], profile: ReplicaProfile, account_id: str
) -> tuple[float, float, float]:
    """Cached share, median and 90th percentile of TTFT in the simulator."""
    recorder = Recorder(60.0, Targets())
    fleet = Fleet(
        lambda replica_id: SteppedReplica(replica_id, profile, BLOCK),
        [f"replica-{number}" for number in range(NUM_REPLICAS)],
        Rendezvous(),
        recorder,
        FleetLimits(),
        (),
    )
    fleet.run(PlayedWorkload(played, account_id))
    results = recorder.results("rendezvous", NUM_REPLICAS, fleet.num_refused, fleet.uncached_by_replica)
    assert results.num_requests == len(played)
    return results.hit_ratio, results.ttft.p50, results.ttft.p90


def traces(num_requests: int) -> dict[str, list[TraceEntry]]:
    """The traces to play, by name: made-up agents and, where it is at hand, a production trace."""
    found = {"made-up agents": synthetic_trace(num_requests, seed=7)}
    if MOONCAKE.is_file():
        found["Mooncake, conversation"] = read_trace(MOONCAKE, 512, num_requests)
    else:
        print(f"There is no {MOONCAKE.name} beside the project: played is the made-up trace alone.")
    return found


def paced(
    prompts: Sequence[Prompt], times: StepTime, load: float, max_duration_s: float
) -> tuple[list[Prompt], float]:
    """As many prompts as take ``max_duration_s`` at most when a replica is busy for a share of ``load``, and
    how much faster than the trace they are to be sent.
    """
    seen: set[object] = set()
    work_s = 0.0
    for count, prompt in enumerate(prompts, start=1):
        cached = 0
        for key in prompt.keys:
            if key not in seen:
                break
            cached += BLOCK
        seen.update(prompt.keys)
        work_s += times.prefill_s * (prompt.num_tokens - cached)
        work_s += prompt.max_tokens * (times.base_s + times.decode_s)
        duration_s = work_s / NUM_REPLICAS / load
        span_s = prompt.entry.timestamp / 1000.0
        if span_s and (duration_s > max_duration_s or count == len(prompts)):
            return list(prompts[:count]), span_s / duration_s
    raise ValueError("there are no prompts, or all come at once")


async def play_live(
    account: DevAccount, times: StepTime, load: float, max_duration_s: float, num_requests: int
) -> dict[str, list[Played]]:
    """Play every trace, one after the other, with words of its own for each."""
    endpoint = Endpoint(account.url, account.account_id, account.api_token, MODEL)
    pace = Pace(1.0, LENGTH, 512, 64, 2 * max_duration_s, 120.0, time.time_ns())
    found = {}
    async with endpoint.session(64, pace.timeout_s) as session:
        calibration = await calibrated(session, endpoint, pace.seed)
        for number, (name, entries) in enumerate(traces(num_requests).items(), start=1):
            own = replace(pace, seed=pace.seed + number)
            prompts, speed = paced(prompts_of(entries, calibration, own), times, load, max_duration_s)
            print(f"{name}: {len(prompts)} requests at {speed:.2f} times the pace of the trace", flush=True)
            found[name] = await replayed(
                session, endpoint, prompts, replace(own, speed=speed), lambda num_done: None
            )
    return found


def limited(home: Path) -> Installation:
    """Two replicas with as many blocks as the simulated ones have."""
    home.mkdir()
    installation = Installation(home)
    installation.config["replicas"]["cache"]["num_blocks"] = NUM_BLOCKS
    (home / "config.yaml").write_text(yaml.safe_dump(installation.config))
    return installation


def compare(name: str, played: Sequence[Played], profile: ReplicaProfile, account_id: str) -> Comparison:
    """One trace in both worlds.

    Raises:
        RuntimeError: requests failed, so that there is nothing to compare.
    """
    failed = [each.exchange.error for each in played if not each.exchange.is_whole]
    if failed:
        raise RuntimeError(f"{len(failed)} of {len(played)} requests failed: {failed[0]}")
    prompt_tokens = sum(each.exchange.prompt_tokens for each in played)
    cached_tokens = sum(each.exchange.cached_tokens for each in played)
    waited = [each.exchange.first_s - each.exchange.sent_s for each in played]
    cached, ttft_p50, ttft_p90 = simulate(played, profile, account_id)
    return Comparison(
        trace=name,
        num_requests=len(played),
        duration_s=played[-1].due_s,
        live_cached=cached_tokens / prompt_tokens,
        simulated_cached=cached,
        live_ttft_p50=float(np.percentile(waited, 50)),
        simulated_ttft_p50=ttft_p50,
        live_ttft_p90=float(np.percentile(waited, 90)),
        simulated_ttft_p90=ttft_p90,
    )


def report(profile: ReplicaProfile, comparisons: Sequence[Comparison], num_steps: int) -> str:
    """Markdown."""
    times = profile.step_time
    lines = [
        f"{num_steps:,} steps measured on two engines side by side; the fit is {1e3 * times.base_s:.2f} ms + "
        f"{1e3 * times.decode_s:.2f} ms a decode + {1e3 * times.prefill_s:.3f} ms a prompt token + "
        f"{1e6 * times.context_s:.2f} us a token attended to, median error {times.relative_error:.1%}.",
        "",
        "| trace | requests | seconds | cached live | simulated | TTFT p50 live, s | simulated "
        "| p90 live | simulated | within bounds |",
        "|---|---|---|---|---|---|---|---|---|---|",
    ]
    lines += [_row(each) for each in comparisons]
    return "\n".join(lines)


def _row(each: Comparison) -> str:
    return (
        f"| {each.trace} | {each.num_requests} | {each.duration_s:.0f} | {each.live_cached:.2%} "
        f"| {each.simulated_cached:.2%} | {each.live_ttft_p50:.3f} | {each.simulated_ttft_p50:.3f} "
        f"({each.simulated_ttft_p50 / each.live_ttft_p50 - 1:+.0%}) | {each.live_ttft_p90:.3f} "
        f"| {each.simulated_ttft_p90:.3f} | {'yes' if each.is_met else 'NO'} |"
    )


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--step-seconds", type=float, default=40.0, help="how long steps are measured")
    parser.add_argument("--seconds", type=float, default=75.0, help="how long each trace is played")
    parser.add_argument("--requests", type=int, default=150, help="of each trace, at most")
    parser.add_argument("--load", type=float, default=0.35, help="share of the time that a replica is busy")
    parser.add_argument("--json", type=Path, help="write the figures here too")
    options = parser.parse_args()
    with tempfile.TemporaryDirectory(prefix="bench-simulator-") as scratch:
        steps_file = Path(scratch) / "steps.jsonl"
        print("Measuring steps ...", flush=True)
        num_steps = measure_together(steps_file, options.step_seconds)
        times = fit(read_steps(steps_file), "steps of this machine")
        base = read_profile(ROOT / "simulator/profiles/cpu-smollm2.yaml")
        profile = msgspec.structs.replace(base, name="here", step_time=times, kv_tokens=NUM_BLOCKS * BLOCK)
        installation = limited(Path(scratch) / "installation")
        installation.up()
        try:
            played = asyncio.run(
                play_live(installation.account, times, options.load, options.seconds, options.requests)
            )
        finally:
            installation.down()
    comparisons = [compare(name, each, profile, ACCOUNT_ID) for name, each in played.items()]
    print("\n" + report(profile, comparisons, num_steps))
    if options.json:
        options.json.write_text(json.dumps([asdict(each) for each in comparisons], indent=2) + "\n")
    return 0 if all(each.is_met for each in comparisons) else 1


if __name__ == "__main__":
    raise SystemExit(main())
