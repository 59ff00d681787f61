"""The simulator against reality: ``make bench-simulator``, about five minutes.

Steps of the engine are measured on this machine, alone and beside another engine, before and after the rest,
and fitted. In between traces are played in turn against a gateway with two live replicas of the embedded
model. The same requests at the same moments, routed by the same hashing, go through the simulator with that
fit. Compared are the cached share (within 2 points) and the median time to the first token (within 25%). The
pace is chosen so that a replica is busy for a given share of the time.
"""

from __future__ import annotations

import argparse
import asyncio
import hashlib
import json
import os
import tempfile
import time
from collections.abc import Hashable, Sequence
from dataclasses import asdict, dataclass, replace
from itertools import chain, groupby
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
from simulator.host import Host
from simulator.measures import Recorder, Targets
from simulator.policies import Rendezvous
from simulator.replica import SteppedReplica
from simulator.requests import SimulatedRequest
from simulator.step_time import ReplicaProfile, StepTime, read_profile
from tests.bench.bench_steps import NUM_BLOCKS
from tests.bench.simulator_calibration import (
    Fit,
    StepTables,
    described,
    errors_by_size,
    fitted,
    request_s,
)
from tests.support.installation import ACCOUNT_ID, MODEL, ROOT, Installation

BLOCK = 16
NUM_REPLICAS = 2
MAX_HIT_DIFFERENCE = 0.02
MAX_TTFT_DIFFERENCE = 0.25
LENGTH = 1 / 32
STAMP_MS = 3000.0
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
    errors_of_rounds: list[float]

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

    def __init__(self, played: Sequence[Played], account_id: str, request_s: float) -> None:
        self._played = iter(enumerate(played))
        self._account_id = account_id
        self._request_s = request_s
        self.made: list[SimulatedRequest] = []

    def next_arrival(self) -> SimulatedRequest | None:
        for index, each in self._played:
            prompt = each.prompt
            request = SimulatedRequest(
                index=index,
                arrival_s=each.due_s + each.late_s + self._request_s,
                account=self._account_id,
                key=prompt.entry.affinity,
                digests=[_digest(key) for key in prompt.keys],
                prompt_tokens=prompt.num_tokens,
                output_tokens=prompt.max_tokens,
            )
            self.made.append(request)
            return request
        return None

    def next_turn(self, answered: SimulatedRequest, now_s: float) -> None:
        """An open loop."""


def _digest(key: Hashable) -> bytes:
    return hashlib.sha256(repr(key).encode()).digest()


def _is_of_template(key: Hashable) -> bool:
    return isinstance(key, tuple) and key[0] == "template"


@dataclass(frozen=True)
class Machine:
    """What the simulator knows of this machine."""

    profile: ReplicaProfile
    slowdown: float
    request_s: float


def simulate(played: Sequence[Played], machine: Machine, account_id: str) -> tuple[float, list[float]]:
    """Cached share, and the seconds to each first token, in the simulator."""
    host = Host(machine.slowdown)
    workload = PlayedWorkload(played, account_id, machine.request_s)
    template = [_digest(key) for key in played[0].prompt.keys if _is_of_template(key)]

    def make_replica(replica_id: str) -> SteppedReplica:
        """One that knows the template, as those do that were asked before the trace is played."""
        replica = SteppedReplica(replica_id, machine.profile, BLOCK, host=host)
        replica.take_in(SimulatedRequest(-1, 0.0, account_id, "", template, len(template) * BLOCK, 1))
        return replica

    recorder = Recorder(60.0, Targets())
    fleet = Fleet(
        make_replica,
        [f"replica-{number}" for number in range(NUM_REPLICAS)],
        Rendezvous(),
        recorder,
        FleetLimits(),
        (),
    )
    fleet.run(workload)
    results = recorder.results("rendezvous", NUM_REPLICAS, fleet.num_refused, fleet.uncached_by_replica)
    assert results.num_requests == len(played)
    waited = [(each.first_token_s or 0.0) - each.arrival_s + machine.request_s for each in workload.made]
    return results.hit_ratio, waited


def traces(num_requests: int) -> dict[str, list[TraceEntry]]:
    """The traces to play, by name: made-up agents and, where it is at hand, a production trace."""
    found = {"made-up agents": synthetic_trace(num_requests, seed=7)}
    if MOONCAKE.is_file():
        found["Mooncake, conversation"] = spread(read_trace(MOONCAKE, 512, num_requests))
    else:
        print(f"There is no {MOONCAKE.name} beside the project: played is the made-up trace alone.")
    return found


def spread(entries: Sequence[TraceEntry]) -> list[TraceEntry]:
    """The stamps of the published trace are three seconds apart: requests of one stamp, evenly over these."""
    found: list[TraceEntry] = []
    for stamp, group in groupby(entries, key=lambda entry: entry.timestamp):
        together = list(group)
        for number, entry in enumerate(together):
            at_ms = stamp + STAMP_MS * number / len(together)
            found.append(msgspec.structs.replace(entry, timestamp=at_ms))
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


class Live:
    """What was played, by trace and round, and what a request took besides its steps."""

    def __init__(self) -> None:
        self.rounds: dict[str, list[list[Played]]] = {}
        self.request_s = 0.0


async def play_live(account: DevAccount, times: StepTime, options: argparse.Namespace) -> Live:
    """Play the traces in turn, several times over, with words of its own for each."""
    endpoint = Endpoint(account.url, account.account_id, account.api_token, MODEL)
    pace = Pace(1.0, LENGTH, 512, 64, 2 * options.seconds, 120.0, time.time_ns())
    live = Live()
    async with endpoint.session(64, pace.timeout_s) as session:
        calibration = await calibrated(session, endpoint, pace.seed)
        live.request_s = await request_s(session, endpoint, times)
        for number in range(options.rounds):
            for name, entries in traces(options.requests).items():
                own = replace(pace, seed=pace.seed + 1 + 2 * number + len(name))
                prompts = prompts_of(entries, calibration, own)
                prompts, speed = paced(prompts, times, options.load, options.seconds)
                print(f"{name}: {len(prompts)} requests at {speed:.2f} times their pace", flush=True)
                live.rounds.setdefault(name, []).append(
                    await replayed(
                        session, endpoint, prompts, replace(own, speed=speed), lambda num_done: None
                    )
                )
    return live


def limited(home: Path) -> Installation:
    """Two replicas with as many blocks as the simulated ones have."""
    home.mkdir()
    installation = Installation(home)
    installation.config["replicas"]["cache"]["num_blocks"] = NUM_BLOCKS
    (home / "config.yaml").write_text(yaml.safe_dump(installation.config))
    return installation


def compare(name: str, rounds: Sequence[Sequence[Played]], machine: Machine, account_id: str) -> Comparison:
    """One trace in both worlds; all requests of all rounds together.

    Raises:
        RuntimeError: requests failed, so that there is nothing to compare.
    """
    played = [each for one_round in rounds for each in one_round]
    failed = [each.exchange.error for each in played if not each.exchange.is_whole]
    if failed:
        raise RuntimeError(f"{len(failed)} of {len(played)} requests failed: {failed[0]}")
    prompt_tokens = sum(each.exchange.prompt_tokens for each in played)
    cached_tokens = sum(each.exchange.cached_tokens for each in played)
    live_waits = [[each.exchange.first_s - each.exchange.sent_s for each in part] for part in rounds]
    simulated = [simulate(part, machine, account_id) for part in rounds]
    weights = [sum(each.exchange.prompt_tokens for each in part) for part in rounds]
    both = [(list(chain(*live_waits))), list(chain(*(waits for _, waits in simulated)))]
    live, made = (np.percentile(waits, (50, 90)) for waits in both)
    return Comparison(
        trace=name,
        num_requests=len(played),
        duration_s=sum(part[-1].due_s for part in rounds),
        live_cached=cached_tokens / prompt_tokens,
        simulated_cached=float(np.average([cached for cached, _ in simulated], weights=weights)),
        live_ttft_p50=float(live[0]),
        simulated_ttft_p50=float(made[0]),
        live_ttft_p90=float(live[1]),
        simulated_ttft_p90=float(made[1]),
        errors_of_rounds=[
            float(np.median(waits) / np.median(real) - 1.0)
            for (_, waits), real in zip(simulated, live_waits, strict=True)
        ],
    )


def report(fit_: Fit, machine: Machine, tables: StepTables, comparisons: Sequence[Comparison]) -> str:
    """Markdown."""
    sizes = errors_by_size(tables.alone, fit_.times)
    lines = [
        described(fit_, machine.request_s),
        "Fitted over measured by kind of step: "
        + ", ".join(f"{name} {ratio:.2f} ({count})" for name, count, ratio in sizes)
        + ".",
        "",
        "| trace | requests | seconds | cached live | simulated | TTFT p50 live, s | simulated "
        "| p90 live | simulated | p50 by round | within bounds |",
        "|---|---|---|---|---|---|---|---|---|---|---|",
    ]
    lines += [_row(each) for each in comparisons]
    return "\n".join(lines)


def _row(each: Comparison) -> str:
    return (
        f"| {each.trace} | {each.num_requests} | {each.duration_s:.0f} | {each.live_cached:.2%} "
        f"| {each.simulated_cached:.2%} | {each.live_ttft_p50:.3f} | {each.simulated_ttft_p50:.3f} "
        f"({each.simulated_ttft_p50 / each.live_ttft_p50 - 1:+.0%}) | {each.live_ttft_p90:.3f} "
        f"| {each.simulated_ttft_p90:.3f} | {', '.join(f'{error:+.0%}' for error in each.errors_of_rounds)} "
        f"| {'yes' if each.is_met else 'NO'} |"
    )


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "--step-seconds", type=float, default=12.0, help="how long steps are measured, four times"
    )
    parser.add_argument("--seconds", type=float, default=42.0, help="how long each trace is played")
    parser.add_argument("--rounds", type=int, default=2, help="how often")
    parser.add_argument("--requests", type=int, default=150, help="of each trace, at most")
    parser.add_argument("--load", type=float, default=0.25, help="share of the time that a replica is busy")
    parser.add_argument("--json", type=Path, help="write the figures here too")
    options = parser.parse_args()
    tables = StepTables()
    with tempfile.TemporaryDirectory(prefix="bench-simulator-") as scratch:
        print("Measuring steps ...", flush=True)
        tables.measure(Path(scratch), options.step_seconds)
        installation = limited(Path(scratch) / "installation")
        installation.up()
        try:
            live = asyncio.run(play_live(installation.account, fitted(tables).times, options))
        finally:
            installation.down()
        print("Measuring steps again ...", flush=True)
        tables.measure(Path(scratch), options.step_seconds)
    found = fitted(tables)
    base = read_profile(ROOT / "simulator/profiles/cpu-smollm2.yaml")
    profile = msgspec.structs.replace(base, name="here", step_time=found.times, kv_tokens=NUM_BLOCKS * BLOCK)
    machine = Machine(profile, found.slowdown, live.request_s)
    comparisons = [compare(name, each, machine, ACCOUNT_ID) for name, each in live.rounds.items()]
    print("\n" + report(found, machine, tables, comparisons))
    if options.json:
        options.json.write_text(json.dumps([asdict(each) for each in comparisons], indent=2) + "\n")
    return 0 if all(each.is_met for each in comparisons) else 1


if __name__ == "__main__":
    raise SystemExit(main())
