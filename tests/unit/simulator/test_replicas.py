"""Both models of a replica: the engine's caching, made-up time."""

from __future__ import annotations

import itertools
import random
from collections.abc import Callable

import pytest

from simulator.disaggregated import DisaggregatedGroup, Split
from simulator.fleet import FleetReplica
from simulator.flow_replica import FlowReplica
from simulator.host import Host
from simulator.replica import SteppedReplica
from simulator.requests import SimulatedRequest
from simulator.step_time import ReplicaProfile
from tests.unit.simulator.conftest import BLOCK, request

Make = Callable[[ReplicaProfile], FleetReplica]
KINDS: list[Make] = [
    lambda profile: SteppedReplica("replica", profile, BLOCK),
    lambda profile: FlowReplica("replica", profile, BLOCK),
    lambda profile: DisaggregatedGroup("replica", profile, BLOCK, Split(1, 2)),
]


def drive(replica: FleetReplica, requests: list[SimulatedRequest]) -> None:
    """Until all are answered."""
    waiting = sorted(requests, key=lambda each: each.arrival_s)
    num_finished = 0
    while num_finished < len(requests):
        wake_s = replica.wake_s
        if waiting and (wake_s is None or waiting[0].arrival_s <= wake_s):
            replica.submit(waiting[0], waiting[0].arrival_s)
            waiting.pop(0)
            continue
        assert wake_s is not None
        num_finished += len(replica.advance(wake_s))
    assert replica.num_in_flight == replica.load_tokens == 0


@pytest.mark.parametrize("make", KINDS)
def test_a_repeated_prompt_is_cached_but_for_its_last_token(make: Make, profile: ReplicaProfile) -> None:
    replica = make(profile)
    first, again = request(0, [1, 2, 3]), request(1, [1, 2, 3], at_s=10.0)
    whole_blocks = request(2, [1, 2, 3], at_s=20.0, extra=0)
    longer = request(3, [1, 2, 9, 10], at_s=30.0)
    drive(replica, [first, again, whole_blocks, longer])
    assert [each.cached_tokens for each in (first, again, whole_blocks, longer)] == [0, 48, 32, 32]
    assert first.first_token_s is not None
    assert again.first_token_s is not None
    assert again.first_token_s - 10.0 < first.first_token_s
    replica.check_invariants()


@pytest.mark.parametrize("make", KINDS)
def test_times_are_in_order_and_everyone_is_answered(make: Make, profile: ReplicaProfile) -> None:
    source = random.Random(5)
    replica = make(profile)
    clock = itertools.accumulate(source.expovariate(20.0) for _ in range(200))
    requests = [
        request(
            number,
            [source.randrange(3) * 100 + block for block in range(source.randrange(12))],
            at_s=at_s,
            extra=source.randrange(1, BLOCK),
            output=source.randrange(1, 40),
        )
        for number, at_s in enumerate(clock)
    ]
    drive(replica, requests)
    for each in requests:
        assert each.first_token_s is not None
        assert each.finished_s is not None
        assert each.arrival_s < each.first_token_s <= each.finished_s
        assert 0 <= each.cached_tokens < each.prompt_tokens
    assert replica.computed_prompt_tokens == sum(each.prompt_tokens - each.cached_tokens for each in requests)
    replica.check_invariants()


@pytest.mark.parametrize("make", KINDS)
def test_a_lost_replica_gives_its_requests_back(make: Make, profile: ReplicaProfile) -> None:
    replica = make(profile)
    requests = [request(number, [number]) for number in range(9)]
    for each in requests:
        replica.submit(each, 0.0)
    assert sorted(each.index for each in replica.lose_all()) == list(range(9))
    assert replica.wake_s is None
    assert replica.num_in_flight == 0


@pytest.mark.parametrize("make", KINDS)
def test_what_never_fits_is_known(make: Make, profile: ReplicaProfile) -> None:
    replica = make(profile)
    assert replica.can_hold(request(0, range(60)))
    assert not replica.can_hold(request(1, range(70)))


@pytest.mark.parametrize("make", KINDS)
def test_matching_blocks_are_those_that_are_cached(make: Make, profile: ReplicaProfile) -> None:
    replica = make(profile)
    drive(replica, [request(0, [1, 2, 3])])
    assert replica.num_matching(request(1, [1, 2, 7])) == 2
    assert replica.num_matching(request(2, [7, 1, 2])) == 0


def test_steps_take_what_the_profile_says(profile: ReplicaProfile) -> None:
    """Two prefill steps of 64 and 17 tokens, then three decodes."""
    replica = SteppedReplica("replica", profile, BLOCK)
    one = request(0, range(5), output=4)
    drive(replica, [one])
    assert one.first_token_s == pytest.approx(2 * 0.01 + 81 * 0.0001)
    assert one.finished_s == pytest.approx(one.first_token_s + 3 * 0.011)


def test_a_handed_over_prompt_is_not_computed_again(profile: ReplicaProfile) -> None:
    """Decode replicas compute less than a block of it."""
    group = DisaggregatedGroup("group", profile, BLOCK, Split(1, 1, link_bytes_per_s=70_272 * 1000))
    one = request(0, range(20), output=3)
    drive(group, [one])
    assert one.first_token_s is not None
    assert one.finished_s is not None
    transfer_s = one.prompt_tokens / 1000
    assert one.finished_s - one.first_token_s == pytest.approx(
        transfer_s + 0.01 + 2 * 0.0001 + 0.011, abs=1e-9
    )


@pytest.mark.parametrize("split", [(0, 1), (1, 0)])
def test_a_split_needs_both_sides(split: tuple[int, int]) -> None:
    with pytest.raises(ValueError, match="at least"):
        Split(*split)
    with pytest.raises(ValueError, match="link_bytes_per_s"):
        Split(1, 1, 0.0)


def test_replicas_of_one_machine_slow_each_other_down(profile: ReplicaProfile) -> None:
    """A step that begins beside another takes as much longer as the machine says; alone it does not."""
    host = Host(1.5)
    first, second = (SteppedReplica(name, profile, BLOCK, host=host) for name in ("a", "b"))
    first.submit(request(0, [1, 2], output=2), 0.0)
    second.submit(request(1, [3, 4], output=2), 0.0)
    alone_s = profile.step_time.step_s(0, 2 * BLOCK + 1, 0)
    assert (first.wake_s, second.wake_s) == pytest.approx((alone_s, 1.5 * alone_s))
    second.lose_all()
    first.advance(alone_s)
    assert first.wake_s == pytest.approx(alone_s + profile.step_time.step_s(1, 0, 0))
    with pytest.raises(ValueError, match="slowdown"):
        Host(0.9)
