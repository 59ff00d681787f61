"""A question put to the simulator: which workload on which fleet under which policies."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Literal, cast

from simulator.disaggregated import DisaggregatedGroup, Split
from simulator.fleet import Fleet, FleetLimits, FleetReplica, PoolEvent
from simulator.flow_replica import FlowReplica
from simulator.measures import Recorder, Results, Targets
from simulator.policies import make_policies
from simulator.replica import SteppedReplica
from simulator.requests import Workload
from simulator.sessions import SessionShape, SessionWorkload
from simulator.step_time import ReplicaProfile
from simulator.trace import TraceScale, TraceWorkload

Fidelity = Literal["step", "flow"]
Progress = Callable[[int, float], None]


@dataclass(frozen=True, slots=True)
class TraceSource:
    """A trace in a file."""

    path: Path
    scale: TraceScale = field(default_factory=TraceScale)

    def open(self, seed: int) -> Workload:
        """A fresh reading of it; the seed changes nothing."""
        return TraceWorkload(self.path, self.scale)


@dataclass(frozen=True, slots=True)
class SessionSource:
    """Simulated agents."""

    shape: SessionShape

    def open(self, seed: int) -> Workload:
        """Fresh sessions, the same for the same seed."""
        return SessionWorkload(self.shape, seed)


@dataclass(frozen=True, slots=True)
class Scenario:
    """Everything that a run depends on. ``split`` makes each replica a group with prefill apart.

    Raises:
        ValueError: naming what contradicts itself.
    """

    source: TraceSource | SessionSource
    profile: ReplicaProfile
    num_replicas: int
    fidelity: Fidelity = "step"
    split: Split | None = None
    limits: FleetLimits = field(default_factory=FleetLimits)
    targets: Targets = field(default_factory=Targets)
    window_s: float = 60.0
    seed: int = 1
    pool_events: Sequence[PoolEvent] = field(default_factory=tuple)

    def __post_init__(self) -> None:
        if self.num_replicas < 1:
            raise ValueError(f"replicas: must be at least 1, not {self.num_replicas}")
        if self.window_s <= 0:
            raise ValueError(f"window: must be positive, not {self.window_s}")
        if self.split is not None and self.fidelity == "flow":
            raise ValueError("split: needs the step model (--fidelity step)")
        _check_events(self.pool_events, self.num_replicas)

    def run(self, policy: str, progress: Progress = lambda num, now_s: None) -> Results:
        """One policy on a fresh fleet.

        Raises:
            simulator.trace.TraceError: the trace is damaged.
        """
        workload = self.source.open(self.seed)
        recorder = Recorder(self.window_s, self.targets)
        fleet = Fleet(
            lambda replica_id: self._replica(replica_id, workload.block_tokens),
            [f"replica-{number}" for number in range(self.num_replicas)],
            make_policies()[policy](),
            recorder,
            self.limits,
            self.pool_events,
        )
        fleet.run(workload, progress)
        return recorder.results(policy, self.num_replicas, fleet.num_refused, fleet.uncached_by_replica)

    def on(self, num_replicas: int) -> Scenario:
        """The same on another number of replicas."""
        return replace(self, num_replicas=num_replicas)

    def marks(self) -> list[tuple[float, str]]:
        """When the pool changes, and how, for plots."""
        return [(event.at_s, f"{event.kind} {event.replica_id}") for event in self.pool_events]

    def _replica(self, replica_id: str, block_tokens: int) -> FleetReplica:
        if self.split is not None:
            return DisaggregatedGroup(replica_id, self.profile, block_tokens, self.split)
        if self.fidelity == "flow":
            return FlowReplica(replica_id, self.profile, block_tokens)
        return SteppedReplica(replica_id, self.profile, block_tokens)


def parse_event(text: str) -> PoolEvent:
    """``add:replica-8@600``, ``drain:replica-0@1200`` or ``fail:replica-3@900`` (seconds).

    Raises:
        ValueError: it is none of these.
    """
    kind, _, rest = text.partition(":")
    replica_id, _, at = rest.rpartition("@")
    if kind not in ("add", "drain", "fail") or not replica_id:
        raise ValueError(
            f"{text!r} is not like add:replica-8@600, drain:replica-0@1200 or fail:replica-3@900"
        )
    try:
        at_s = float(at)
    except ValueError:
        raise ValueError(f"{text!r}: {at!r} is not a time in seconds") from None
    return PoolEvent(at_s, cast("Literal['add', 'drain', 'fail']", kind), replica_id)


def _check_events(events: Sequence[PoolEvent], num_replicas: int) -> None:
    known = {f"replica-{number}" for number in range(num_replicas)}
    for event in sorted(events, key=lambda event: event.at_s):
        if event.kind == "add":
            if event.replica_id in known:
                raise ValueError(f"event: {event.replica_id} is there already at {event.at_s:g} s")
            known.add(event.replica_id)
        elif event.replica_id not in known:
            raise ValueError(f"event: there is no {event.replica_id} at {event.at_s:g} s")
        else:
            known.remove(event.replica_id)
