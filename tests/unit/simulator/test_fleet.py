"""Runs of whole fleets: repeatable, nothing lost, whatever the pool does."""

from __future__ import annotations

import itertools
import random

import pytest

from simulator.fleet import Fleet, FleetLimits, PoolEvent
from simulator.measures import Recorder, Results, Targets
from simulator.policies import make_policies
from simulator.replica import SteppedReplica
from simulator.requests import SimulatedRequest
from simulator.scenario import Scenario, SessionSource, parse_event
from simulator.sessions import SessionShape
from simulator.step_time import ReplicaProfile
from tests.unit.simulator.conftest import BLOCK, Listed, request


def some_requests(count: int = 300) -> list[SimulatedRequest]:
    source = random.Random(6)
    clock = itertools.accumulate(source.expovariate(60.0) for _ in range(count))
    return [of_session(number, source.randrange(40), at_s) for number, at_s in enumerate(clock)]


def of_session(number: int, session: int, at_s: float) -> SimulatedRequest:
    blocks = [session * 100 + block for block in range(6)]
    return request(number, blocks, at_s=at_s, key=f"k{session}")


def run(
    profile: ReplicaProfile,
    requests: list[SimulatedRequest],
    *,
    policy: str = "rendezvous",
    events: tuple[PoolEvent, ...] = (),
    limits: FleetLimits | None = None,
) -> tuple[Fleet, Results]:
    recorder = Recorder(1.0, Targets())
    fleet = Fleet(
        lambda replica_id: SteppedReplica(replica_id, profile, BLOCK),
        ["replica-0", "replica-1", "replica-2"],
        make_policies()[policy](),
        recorder,
        limits or FleetLimits(),
        events,
    )
    fleet.run(Listed(requests))
    for replica in fleet.replicas:
        assert replica.num_in_flight == 0
        replica.check_invariants()
    return fleet, recorder.results(policy, 3, fleet.num_refused, fleet.uncached_by_replica)


@pytest.mark.parametrize("policy", list(make_policies()))
def test_every_policy_answers_everyone_and_repeats_exactly(profile: ReplicaProfile, policy: str) -> None:
    _, first = run(profile, some_requests(), policy=policy)
    _, second = run(profile, some_requests(), policy=policy)
    assert first == second
    assert (first.num_requests, first.num_refused) == (300, 0)
    assert sum(window.num_requests for window in first.windows) == 300


def test_affinity_keeps_prefixes_warm(profile: ReplicaProfile) -> None:

    def turns() -> list[SimulatedRequest]:
        return [
            of_session(turn * 20 + session, session, turn * 2 + session / 20)
            for turn in range(5)
            for session in range(20)
        ]

    by_key = run(profile, turns())[1].hit_ratio
    by_turn = run(profile, turns(), policy="round-robin")[1].hit_ratio
    assert by_key > 0.6 > by_turn


def test_requests_of_a_failed_replica_start_over_elsewhere(profile: ReplicaProfile) -> None:
    calm, requests = some_requests(), some_requests()
    run(profile, calm)
    caught = next(each for each in calm[100:] if each.replica_id == "replica-1")
    fails_s = caught.arrival_s + 0.001
    fleet, results = run(profile, requests, events=(PoolEvent(fails_s, "fail", "replica-1"),))
    assert results.num_requests == 300
    assert results.num_retried > 0
    assert requests[caught.index].num_attempts == 2
    assert {each.id for each in fleet.replicas} == {"replica-0", "replica-2"}
    assert all(each.replica_id != "replica-1" for each in requests if (each.finished_s or 0) > fails_s)


def test_a_draining_replica_finishes_what_it_has(profile: ReplicaProfile) -> None:
    fleet, results = run(profile, some_requests(), events=(PoolEvent(2.0, "drain", "replica-1"),))
    assert (results.num_requests, results.num_retried) == (300, 0)
    assert "replica-1" not in {each.id for each in fleet.replicas}
    assert "replica-1" in fleet.uncached_by_replica


def test_a_newcomer_takes_only_its_own_sessions(profile: ReplicaProfile) -> None:
    before, after = some_requests(), some_requests()
    run(profile, before)
    run(profile, after, events=(PoolEvent(0.0, "add", "replica-3"),))
    moved = {
        (old.key, new.replica_id)
        for old, new in zip(before, after, strict=True)
        if old.replica_id != new.replica_id
    }
    assert moved
    assert {replica_id for _, replica_id in moved} == {"replica-3"}  # fmt: skip


def test_full_replicas_spill_and_then_requests_wait(profile: ReplicaProfile) -> None:
    requests = [request(number, [number], key="same") for number in range(30)]
    _, results = run(profile, requests, limits=FleetLimits(max_in_flight=2))
    assert results.num_requests == 30
    assert len({each.replica_id for each in requests}) == 3


def test_what_has_no_room_anywhere_is_refused(profile: ReplicaProfile) -> None:
    requests = [request(number, [number], key="same") for number in range(30)]
    _, results = run(profile, requests, limits=FleetLimits(max_in_flight=2, max_waiting=4))
    assert (results.num_requests, results.num_refused) == (10, 20)
    _, results = run(profile, [request(0, range(100)), request(1, [1])])
    assert (results.num_requests, results.num_refused) == (1, 1)


def test_without_replicas_everything_is_refused(profile: ReplicaProfile) -> None:
    events = tuple(PoolEvent(0.0, "fail", f"replica-{number}") for number in range(3))
    _, results = run(profile, some_requests(20), events=events)
    assert (results.num_requests, results.num_refused, results.imbalance) == (0, 20, 0.0)


def test_flow_and_step_agree_on_what_is_cached(profile: ReplicaProfile) -> None:
    shape = SessionShape(
        num_sessions=60, sessions_per_s=1.0, shared_tokens=64, mean_first_tokens=60, mean_turn_tokens=30,
        mean_output_tokens=10, mean_think_s=3.0, block_tokens=BLOCK, max_prompt_tokens=500,
    )  # fmt: skip
    scenario = Scenario(SessionSource(shape), profile, 4)
    step = scenario.run("rendezvous")
    flow = Scenario(SessionSource(shape), profile, 4, fidelity="flow").run("rendezvous")
    assert abs(step.hit_ratio - flow.hit_ratio) < 0.05
    assert step.hit_ratio > 0.5


@pytest.mark.parametrize(
    ("text", "message"),
    [("grow:replica-8@1", "is not like"), ("add:@1", "is not like"), ("add:replica-8@soon", "not a time")],
)
def test_events_are_read_or_refused(text: str, message: str) -> None:
    assert parse_event("fail:replica-3@9.5") == PoolEvent(9.5, "fail", "replica-3")
    with pytest.raises(ValueError, match=message):
        parse_event(text)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"num_replicas": 0}, "replicas"),
        ({"window_s": 0.0}, "window"),
        ({"pool_events": (PoolEvent(1.0, "add", "replica-0"),)}, "there already"),
        ({"pool_events": (PoolEvent(1.0, "fail", "replica-9"),)}, "there is no replica-9"),
    ],
)
def test_contradictions_are_refused(
    profile: ReplicaProfile, changes: dict[str, object], message: str
) -> None:
    source = SessionSource(SessionShape(num_sessions=1, sessions_per_s=1.0))
    with pytest.raises(ValueError, match=message):
        Scenario(**{"source": source, "profile": profile, "num_replicas": 2, **changes})  # type: ignore[arg-type]
