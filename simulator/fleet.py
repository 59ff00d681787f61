"""The event loop of a run: arrivals, routing, replicas that come, drain and fail.

Events are ordered by time and then by the order in which they were made, so that a run repeats exactly.
"""

from __future__ import annotations

import heapq
import itertools
from collections import deque
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Literal, Protocol

from simulator.measures import Recorder
from simulator.policies import Policy
from simulator.requests import SimulatedRequest, Workload


class FleetReplica(Protocol):
    """A replica as the fleet drives it (:mod:`simulator.replica`, :mod:`simulator.flow_replica`)."""

    id: str
    weight: float
    num_in_flight: int
    load_tokens: int
    is_draining: bool

    @property
    def computed_prompt_tokens(self) -> int: ...
    @property
    def wake_s(self) -> float | None: ...
    def can_hold(self, request: SimulatedRequest) -> bool: ...
    def num_matching(self, request: SimulatedRequest) -> int: ...
    def submit(self, request: SimulatedRequest, now_s: float) -> None: ...
    def advance(self, now_s: float) -> list[SimulatedRequest]: ...
    def lose_all(self) -> list[SimulatedRequest]: ...
    def check_invariants(self) -> None: ...


@dataclass(frozen=True, slots=True)
class PoolEvent:
    """At ``at_s``: ``add`` a replica with an empty cache, ``drain`` one (no new requests, then it goes), or
    ``fail`` one (its requests start over elsewhere).
    """

    at_s: float
    kind: Literal["add", "drain", "fail"]
    replica_id: str


@dataclass(frozen=True, slots=True)
class FleetLimits:
    """As in the gateway: ``max_in_flight`` per replica before a request goes to the next in rank;
    ``max_waiting`` requests wait when all are full. ``max_requests`` ends a run.
    """

    max_in_flight: int = 256
    max_waiting: int = 1_000_000
    max_requests: int | None = None


class Fleet:
    """One run of one policy. Made, run once, and read."""

    def __init__(
        self,
        make_replica: Callable[[str], FleetReplica],
        replica_ids: Sequence[str],
        policy: Policy,
        recorder: Recorder,
        limits: FleetLimits,
        pool_events: Iterable[PoolEvent] = (),
    ) -> None:
        self._make_replica = make_replica
        self._policy = policy
        self._recorder = recorder
        self._limits = limits
        self._replicas = {replica_id: make_replica(replica_id) for replica_id in replica_ids}
        self._routable = tuple(self._replicas.values())
        self._events: list[tuple[float, int, object]] = []
        self._order = itertools.count()
        self._due: dict[str, float] = {}
        self._waiting: deque[SimulatedRequest] = deque()
        self._num_arrived = 0
        self.num_refused = 0
        self.now_s = 0.0
        self.uncached_by_replica: dict[str, int] = {}
        for event in pool_events:
            self._push(event.at_s, event)

    @property
    def replicas(self) -> tuple[FleetReplica, ...]:
        """All that are there, draining ones among them."""
        return tuple(self._replicas.values())

    def run(
        self, workload: Workload, progress: Callable[[int, float], None] = lambda num, now_s: None
    ) -> None:
        """Until every request is answered or refused. ``progress`` gets arrivals so far and the time."""
        self._workload = workload
        self._push_next_arrival()
        while self._events:
            self.now_s, _, subject = heapq.heappop(self._events)
            if isinstance(subject, SimulatedRequest):
                self._arrive(subject)
                if self._num_arrived % 1000 == 0:
                    progress(self._num_arrived, self.now_s)
            elif isinstance(subject, PoolEvent):
                self._change_pool(subject)
            else:
                self._advance(str(subject))
        self.num_refused += len(self._waiting)
        self.uncached_by_replica |= {
            replica.id: replica.computed_prompt_tokens for replica in self._replicas.values()
        }

    # -- requests ------------------------------------------------------------------------------------------

    def _push_next_arrival(self) -> None:
        request = self._workload.next_arrival()
        if request is not None:
            self._push(request.arrival_s, request)

    def _arrive(self, request: SimulatedRequest) -> None:
        limit = self._limits.max_requests
        if limit is not None and self._num_arrived >= limit:
            return
        self._num_arrived += 1
        if request.is_opening:
            self._push_next_arrival()
        self._place(request)

    def _place(self, request: SimulatedRequest) -> None:
        replica = self._choose(request)
        if replica is not None:
            request.num_attempts += 1
            request.replica_id = replica.id
            replica.submit(request, self.now_s)
            self._watch(replica)
        elif any(each.can_hold(request) for each in self._routable) and (
            len(self._waiting) < self._limits.max_waiting
        ):
            self._waiting.append(request)
        else:
            self.num_refused += 1

    def _choose(self, request: SimulatedRequest) -> FleetReplica | None:
        if not self._routable:
            return None
        for candidate in self._policy(request, self._routable):
            replica = self._replicas[candidate.id]
            if replica.num_in_flight < self._limits.max_in_flight and replica.can_hold(request):
                return replica
        return None

    def _advance(self, replica_id: str) -> None:
        replica = self._replicas.get(replica_id)
        if replica is None or self._due.get(replica_id) != self.now_s:
            return  # gone, or woken for something that has been superseded
        del self._due[replica_id]
        finished = replica.advance(self.now_s)
        self._watch(replica)
        for request in finished:
            self._recorder.finished(request)
            following = self._workload.next_turn(request, self.now_s)
            if following is not None:
                self._push(following.arrival_s, following)
        if finished and self._waiting:
            self._place_waiting()
        if replica.is_draining and replica.num_in_flight == 0:
            self._remove(replica)

    def _place_waiting(self) -> None:
        for _ in range(len(self._waiting)):
            request = self._waiting[0]
            if self._choose(request) is None:
                return
            self._waiting.popleft()
            self._place(request)

    def _watch(self, replica: FleetReplica) -> None:
        wake_s = replica.wake_s
        if wake_s is not None and self._due.get(replica.id) != wake_s:
            self._due[replica.id] = wake_s
            self._push(wake_s, replica.id)

    def _push(self, at_s: float, subject: object) -> None:
        heapq.heappush(self._events, (at_s, next(self._order), subject))

    # -- replicas ------------------------------------------------------------------------------------------

    def _change_pool(self, event: PoolEvent) -> None:
        if event.kind == "add":
            self._replicas[event.replica_id] = self._make_replica(event.replica_id)
        else:
            replica = self._replicas[event.replica_id]
            replica.is_draining = True
            if event.kind == "fail" or replica.num_in_flight == 0:
                self._remove(replica)
        self._routable = tuple(each for each in self._replicas.values() if not each.is_draining)
        self._place_waiting()

    def _remove(self, replica: FleetReplica) -> None:
        del self._replicas[replica.id]
        self._due.pop(replica.id, None)
        self._routable = tuple(each for each in self._replicas.values() if not each.is_draining)
        self.uncached_by_replica[replica.id] = replica.computed_prompt_tokens
        for request in replica.lose_all():
            request.first_token_s = None
            self._place(request)
