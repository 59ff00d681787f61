"""Places on replicas, waiting for them, and health."""

from __future__ import annotations

import asyncio

import pytest

from gateway.config import HealthConfig, ReplicaAddress, RoutingConfig
from gateway.errors import Reason, Refusal
from gateway.predictions import CachePredictions
from gateway.replicas import Replica, ReplicaTable


def table(count: int = 2, **routing: float) -> ReplicaTable:
    addresses = [
        ReplicaAddress(id=f"r{index}", url=f"http://127.0.0.1:{index + 1}") for index in range(count)
    ]
    replicas = ReplicaTable(
        addresses,
        RoutingConfig(**{"max_in_flight": 1, "capacity_wait_s": 0.2} | routing),  # type: ignore[arg-type]
        HealthConfig(failures_to_down=2),
    )
    for replica in replicas.replicas:
        replicas.report_answer(replica, "ready")
    return replicas


async def take(replicas: ReplicaTable, *excluded: Replica, rejects: bool = False) -> Replica:
    return await replicas.take(replicas.replicas, excluded, rejects_if_busy=rejects)


async def refused(replicas: ReplicaTable, *excluded: Replica, rejects: bool = False) -> Reason:
    with pytest.raises(Refusal) as caught:
        await take(replicas, *excluded, rejects=rejects)
    assert caught.value.retry_after_s == 1
    return caught.value.reason


async def test_the_first_in_rank_with_room_is_taken() -> None:
    replicas = table()
    first = await take(replicas)
    second = await take(replicas)
    assert (first.id, second.id) == ("r0", "r1")
    replicas.put_back(first)
    assert (await take(replicas)).id == "r0"


async def test_excluded_draining_starting_and_down_replicas_are_passed_over() -> None:
    replicas = table(4)
    replicas.report_answer(replicas.replicas[0], "draining")
    replicas.report_answer(replicas.replicas[1], "starting")
    assert (await take(replicas, replicas.replicas[2])).id == "r3"


async def test_a_wait_for_room_is_bounded() -> None:
    replicas = table(1)
    await take(replicas)
    started = asyncio.get_running_loop().time()
    assert await refused(replicas) is Reason.CAPACITY
    assert 0.15 < asyncio.get_running_loop().time() - started < 1
    assert replicas.num_waiting == 0


async def test_rejecting_does_not_wait() -> None:
    replicas = table(1, capacity_wait_s=30)
    await take(replicas)
    assert await asyncio.wait_for(refused(replicas, rejects=True), 1) is Reason.CAPACITY


async def test_no_ready_replica_is_another_refusal() -> None:
    replicas = table(1)
    replicas.report_failure(replicas.replicas[0], is_certain=True)
    assert await refused(replicas) is Reason.UNAVAILABLE


async def test_nobody_waits_for_what_is_excluded() -> None:
    replicas = table(1, capacity_wait_s=30)
    assert await asyncio.wait_for(refused(replicas, *replicas.replicas), 1) is Reason.CAPACITY


async def test_who_waits_longest_is_served_first() -> None:
    replicas = table(1, capacity_wait_s=5)
    held = await take(replicas)
    order: list[int] = []

    async def wait(index: int) -> None:
        replica = await take(replicas)
        order.append(index)
        await asyncio.sleep(0)
        replicas.put_back(replica)

    waiting = [asyncio.create_task(wait(index)) for index in range(5)]
    await asyncio.sleep(0)
    assert replicas.num_waiting == 5
    newcomer = asyncio.create_task(wait(99))
    replicas.put_back(held)
    await asyncio.gather(*waiting, newcomer)
    assert order == [0, 1, 2, 3, 4, 99]
    assert replicas.replicas[0].num_in_flight == 0


async def test_a_place_at_once_overtakes_nobody_who_waits() -> None:
    replicas = table()
    first, second = replicas.replicas
    await take(replicas)
    waiting = asyncio.create_task(take(replicas, second))
    await asyncio.sleep(0)
    assert replicas.take_at_once(replicas.replicas, (), rejects_if_busy=False) is None
    assert replicas.take_at_once(replicas.replicas, (), rejects_if_busy=True) is second
    replicas.put_back(first)
    assert await waiting is first


async def test_a_queue_of_waiting_requests_is_bounded() -> None:
    replicas = table(1, capacity_wait_s=5, max_waiting=2)
    held = await take(replicas)
    waiting = [asyncio.create_task(take(replicas)) for _ in range(2)]
    await asyncio.sleep(0)
    assert await asyncio.wait_for(refused(replicas), 1) is Reason.CAPACITY
    replicas.put_back(held)
    replicas.put_back(await waiting[0])
    await waiting[1]


async def test_a_place_given_to_somebody_who_left_is_not_lost() -> None:
    replicas = table(1, capacity_wait_s=5)
    held = await take(replicas)
    leaving, staying = asyncio.create_task(take(replicas)), asyncio.create_task(take(replicas))
    await asyncio.sleep(0)
    replicas.put_back(held)  # hands the place to the first, which is cancelled before it can run
    leaving.cancel()
    assert (await asyncio.wait_for(staying, 1)).num_in_flight == 1
    with pytest.raises(asyncio.CancelledError):
        await leaving


async def test_somebody_who_gives_up_waiting_leaves_the_queue() -> None:
    replicas = table(1, capacity_wait_s=5)
    held = await take(replicas)
    leaving = asyncio.create_task(take(replicas))
    await asyncio.sleep(0)
    leaving.cancel()
    await asyncio.gather(leaving, return_exceptions=True)
    assert replicas.num_waiting == 0
    replicas.put_back(held)
    assert held.num_in_flight == 0


async def test_who_waits_for_another_replica_does_not_hold_up_the_rest() -> None:
    replicas = table(2, capacity_wait_s=5)
    first, second = await take(replicas), await take(replicas)
    for_first = asyncio.create_task(take(replicas, second))
    for_second = asyncio.create_task(take(replicas, first))
    await asyncio.sleep(0)
    replicas.put_back(second)
    assert await asyncio.wait_for(for_second, 1) is second
    assert not for_first.done()
    replicas.put_back(first)
    assert await for_first is first


async def test_a_replica_that_becomes_ready_serves_those_who_wait() -> None:
    replicas = table(1, capacity_wait_s=5)
    replica = replicas.replicas[0]
    replicas.report_failure(replica, is_certain=True)
    waiting = asyncio.create_task(take(replicas))
    await asyncio.sleep(0)
    replicas.report_answer(replica, "ready")
    assert await waiting is replica


async def test_failures_in_a_row_bring_a_replica_down_and_one_answer_brings_it_back() -> None:
    replicas = table(1)
    replica = replicas.replicas[0]
    replicas.report_failure(replica)
    assert replica.health == "ready"
    replicas.report_answer(replica, "ready")
    replicas.report_failure(replica)
    assert replica.health == "ready", "they were not in a row"
    replicas.report_failure(replica)
    assert replica.health == "down"
    assert replicas.num_ready == 0
    became_ready: list[Replica] = []
    replicas.on_ready(became_ready.append)
    replicas.report_answer(replica, "ready")
    replicas.report_answer(replica, "ready")
    assert became_ready == [replica]


def test_replicas_can_be_bound_to_models() -> None:
    addresses = [
        ReplicaAddress(id="a", url="http://a", models=["m"]),
        ReplicaAddress(id="b", url="http://b"),
        ReplicaAddress(id="c", url="http://c", models=["n"]),
    ]
    replicas = ReplicaTable(addresses, RoutingConfig(), HealthConfig())
    assert [replica.id for replica in replicas.serving("m")] == ["a", "b"]
    assert [replica.id for replica in replicas.serving("n")] == ["b", "c"]


def test_predictions_follow_the_last_turn_and_are_bounded() -> None:
    predictions = CachePredictions(max_sessions=2)
    assert predictions.predict("a", "s", "r0") == 0
    predictions.learn("a", "s", "r0", 100)
    predictions.learn("a", "s", "r0", 150)
    assert predictions.predict("a", "s", "r0") == 150
    assert predictions.predict("a", "s", "r1") == 0
    assert predictions.predict("b", "s", "r0") == 0
    predictions.learn("a", "t", "r0", 1)
    predictions.learn("a", "u", "r0", 1)
    assert predictions.predict("a", "s", "r0") == 0
