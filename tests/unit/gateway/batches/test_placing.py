"""Which items go where: lanes, headroom, selection."""

from __future__ import annotations

from collections import Counter

import msgspec
import pytest

from backend.wire import ReplicaStats
from gateway.batches.config import BatchesConfig
from gateway.batches.headroom import Headroom
from gateway.batches.lanes import Lanes
from gateway.batches.selection import Selector
from gateway.catalog import Catalog
from gateway.config import HealthConfig, ReplicaAddress, RoutingConfig, ServedModel
from gateway.replicas import Replica, ReplicaTable
from gateway.routing import RendezvousRanking
from tests.support.batches import Office, chat_item, new_batch
from tests.support.ledger import ACCOUNT, KIMI, OTHER_ACCOUNT


def table_of(count: int, models: list[str] | None = None) -> ReplicaTable:
    addresses = [
        ReplicaAddress(id=f"replica-{number}", url="http://127.0.0.1:1", models=models or [])
        for number in range(count)
    ]
    table = ReplicaTable(addresses, RoutingConfig(max_in_flight=4), HealthConfig())
    for replica in table.replicas:
        table.report_answer(replica, "ready")
    return table


class TestLanes:
    def test_every_replica_has_a_lane_of_every_group(self) -> None:
        lanes, replicas = Lanes(RendezvousRanking()), table_of(8).replicas
        for group in ("a", "b", "c"):
            keys = {lanes.key_for(replica, ACCOUNT, group, replicas) for replica in replicas}
            assert len(keys) == 8
            for replica in replicas:
                key = lanes.key_for(replica, ACCOUNT, group, replicas)
                assert RendezvousRanking()(ACCOUNT, key, replicas)[0] is replica

    def test_a_group_has_one_home_and_homes_are_spread(self) -> None:
        lanes, replicas = Lanes(RendezvousRanking()), table_of(4).replicas
        homes = Counter(
            replica.id
            for number in range(400)
            for replica in replicas
            if lanes.is_home(replica, ACCOUNT, f"group-{number}", replicas)
        )
        assert homes.total() == 400
        assert min(homes.values()) > 60

    def test_without_replicas_there_is_no_home(self) -> None:
        lanes, (replica,) = Lanes(RendezvousRanking()), table_of(1).replicas
        assert not lanes.is_home(replica, ACCOUNT, "a", [])


class Statistics:
    """Stands for the client: says how many sequences wait in a replica."""

    def __init__(self) -> None:
        self.num_waiting = 0
        self.status = 200

    async def fetch(self, *_: object, **__: object) -> tuple[int, bytes]:
        stats = ReplicaStats(replica_id="r", model="m", started_at=0.0, num_waiting=self.num_waiting)
        return self.status, msgspec.json.encode(stats)


class TestHeadroom:
    @pytest.fixture
    def table(self) -> ReplicaTable:
        return table_of(1)

    @pytest.fixture
    def statistics(self) -> Statistics:
        return Statistics()

    @pytest.fixture
    def headroom(self, table: ReplicaTable, statistics: Statistics) -> Headroom:
        self.now = 100.0
        config = BatchesConfig(max_in_flight_per_replica=3, max_busy_in_flight=5)
        return Headroom(table, statistics, (), config, lambda: self.now)  # type: ignore[arg-type]

    def test_items_are_bounded_beside_live_requests(self, table: ReplicaTable, headroom: Headroom) -> None:
        (replica,) = table.replicas
        assert headroom.room_on(replica, 0) == 3
        assert headroom.room_on(replica, 2) == 1
        replica.num_in_flight = 4
        assert headroom.room_on(replica, 1) == 1
        replica.num_in_flight = 7
        assert headroom.room_on(replica, 0) == 0

    async def test_nothing_runs_where_somebody_waits(
        self, table: ReplicaTable, headroom: Headroom, statistics: Statistics
    ) -> None:
        (replica,) = table.replicas
        statistics.num_waiting = 2
        await headroom.look()
        assert headroom.room_on(replica, 0) == 0
        assert headroom.num_to_preempt(replica, 3) == 0  # a sequence may wait for one step
        await headroom.look()
        replica.num_in_flight = 3
        assert headroom.num_to_preempt(replica, 3) == 0  # the items wait for each other
        replica.num_in_flight = 8
        assert headroom.num_to_preempt(replica, 3) == 2
        assert headroom.num_to_preempt(replica, 1) == 1
        statistics.num_waiting = 0
        await headroom.look()
        assert headroom.num_to_preempt(replica, 3) == 0
        replica.num_in_flight = 0
        assert headroom.room_on(replica, 0) == 3

    async def test_a_replica_without_statistics_is_judged_by_what_is_known(
        self, table: ReplicaTable, headroom: Headroom, statistics: Statistics
    ) -> None:
        statistics.status = 404
        await headroom.look()
        assert headroom.room_on(table.replicas[0], 0) == 3

    def test_one_that_said_it_is_busy_is_left_alone_for_a_moment(
        self, table: ReplicaTable, headroom: Headroom
    ) -> None:
        (replica,) = table.replicas
        headroom.report_busy(replica)
        assert headroom.room_on(replica, 0) == 0
        self.now += 1.0
        assert headroom.room_on(replica, 0) == 3

    def test_a_replica_that_is_not_ready_gets_nothing(self, table: ReplicaTable, headroom: Headroom) -> None:
        (replica,) = table.replicas
        table.report_answer(replica, "draining")
        assert headroom.room_on(replica, 0) == 0


class TestSelecting:
    def selector(self, office: Office, table: ReplicaTable) -> Selector:
        catalog = Catalog([ServedModel(id=KIMI), ServedModel(id="other-model")])
        return Selector(office.queue, Lanes(RendezvousRanking()), table, catalog)

    def test_groups_go_home_as_long_as_both_have_some(self, office: Office) -> None:
        table = table_of(2)
        selector, lanes = self.selector(office, table), Lanes(RendezvousRanking())
        items = [chat_item(f"{n}", system=f"You are reviewer {n % 10}. " * 100) for n in range(60)]
        office.queue.submit(new_batch("b", items))
        num_at_home = 0
        for _ in range(10):
            for item in selector.select("worker", dict.fromkeys(table.replicas, 2)):
                group = item.lease.prefix_group
                num_at_home += lanes.is_home(item.replica, ACCOUNT, group, table.replicas)
                assert RendezvousRanking()(ACCOUNT, item.affinity_key, table.replicas)[0] is item.replica
        assert num_at_home >= 36

    def test_no_replica_idles_while_items_wait(self, office: Office) -> None:
        table = table_of(4)
        selector = self.selector(office, table)
        office.queue.submit(new_batch("b", [chat_item(f"{n}", system="Same. " * 400) for n in range(20)]))
        selected = selector.select("worker", dict.fromkeys(table.replicas, 5))
        assert Counter(item.replica.id for item in selected).most_common() == [
            (f"replica-{number}", 5) for number in range(4)
        ]
        assert len({item.affinity_key for item in selected}) == 4

    def test_accounts_take_turns(self, office: Office) -> None:
        table = table_of(1)
        selector = self.selector(office, table)
        office.queue.submit(new_batch("large", [chat_item(f"{n}") for n in range(40)]))
        office.clock.sleep(1)
        office.queue.submit(
            new_batch("small", [chat_item(f"{n}") for n in range(4)], account_id=OTHER_ACCOUNT)
        )
        accounts = [
            item.lease.account_id
            for _ in range(4)
            for item in selector.select("worker", {table.replicas[0]: 2})
        ]
        assert Counter(accounts) == {ACCOUNT: 4, OTHER_ACCOUNT: 4}

    def test_an_account_s_batches_run_in_their_order(self, office: Office) -> None:
        table = table_of(1)
        selector = self.selector(office, table)
        office.queue.submit(new_batch("first", [chat_item("a"), chat_item("b")]))
        office.clock.sleep(1)
        office.queue.submit(new_batch("second", [chat_item("a"), chat_item("b")]))
        selected = [item for _ in range(4) for item in selector.select("worker", {table.replicas[0]: 1})]
        assert [item.lease.batch_id for item in selected] == ["first", "first", "second", "second"]

    def test_items_go_to_replicas_of_their_model(self, office: Office) -> None:
        table = table_of(1, models=["other-model"])
        selector = self.selector(office, table)
        office.queue.submit(new_batch("b", [chat_item("a")]))
        room: dict[Replica, int] = {table.replicas[0]: 5}
        assert selector.select("worker", room) == []
        office.queue.submit(new_batch("c", [chat_item("a")], model="other-model"))
        assert [item.lease.batch_id for item in selector.select("worker", room)] == ["c"]
