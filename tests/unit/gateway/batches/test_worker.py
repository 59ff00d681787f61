"""The worker's own part: saving, renewing, stopping."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable
from typing import Any

import pytest

from billing.store import StoreAwayError
from gateway.batches.config import BatchesConfig
from gateway.batches.headroom import Headroom
from gateway.batches.jobs import Ending, ItemCounts
from gateway.batches.lanes import Lanes
from gateway.batches.metrics import BatchMetrics
from gateway.batches.runner import Postponement, RunningItem
from gateway.batches.selection import Selector
from gateway.batches.worker import BatchWorker
from gateway.catalog import Catalog
from gateway.config import HealthConfig, ReplicaAddress, RoutingConfig, ServedModel
from gateway.replicas import ReplicaTable
from gateway.routing import RendezvousRanking
from tests.support.batches import Office, chat_item, new_batch, success_of
from tests.support.ledger import KIMI
from tests.support.waiting import eventually

CONFIG = BatchesConfig(poll_interval_s=0.02, sweep_interval_s=0.02, lease_s=0.3, retry_initial_s=0.001)


class ScriptedRunner:
    """Ends items at once, or holds them until their client leaves."""

    def __init__(self) -> None:
        self.holds = False
        self.running: list[RunningItem] = []

    async def run(self, item: RunningItem) -> Ending | Postponement:
        self.running.append(item)
        if self.holds:
            left = asyncio.Event()
            item.exchange.on_disconnect(left.set)
            await left.wait()
            return Postponement(0.0)
        return success_of(item.lease)


class NoStatistics:
    async def fetch(self, *_: object, **__: object) -> tuple[int, bytes]:
        return 404, b""


@pytest.fixture
def runner() -> ScriptedRunner:
    return ScriptedRunner()


@pytest.fixture
async def worker(office: Office, runner: ScriptedRunner) -> AsyncIterator[BatchWorker]:
    address = ReplicaAddress(id="r", url="http://127.0.0.1:1")
    table = ReplicaTable([address], RoutingConfig(), HealthConfig())
    table.report_answer(table.replicas[0], "ready")
    clock = asyncio.get_running_loop().time
    client: Any = NoStatistics()
    scripted: Any = runner
    selector = Selector(office.queue, Lanes(RendezvousRanking()), table, Catalog([ServedModel(id=KIMI)]))
    worker = BatchWorker(
        "worker-1", office.queue, office.closer, selector, Headroom(table, client, (), CONFIG, clock),
        scripted, table, BatchMetrics(office.store, office.clock), CONFIG,
    )  # fmt: skip
    yield worker
    await worker.stop()


def submit(office: Office, count: int = 6) -> None:
    office.queue.submit(new_batch("b", [chat_item(f"question {number}") for number in range(count)]))


def counted(office: Office, **counts: int) -> Callable[[], bool]:
    return lambda: office.archive.counts(["b"])["b"] == ItemCounts(**counts)


async def test_it_empties_the_queue(office: Office, worker: BatchWorker) -> None:
    submit(office)
    worker.start()
    await eventually(counted(office, succeeded=6))


async def test_a_stop_gives_back_what_runs(
    office: Office, worker: BatchWorker, runner: ScriptedRunner
) -> None:
    runner.holds = True
    submit(office, 12)
    worker.start()
    await eventually(lambda: len(runner.running) == 8)
    await worker.stop()
    assert counted(office, queued=12)()
    assert {item.num_failures for item in office.lease_all("b", "worker-2")} == {0}


async def test_what_was_taken_back_is_dropped(
    office: Office, worker: BatchWorker, runner: ScriptedRunner
) -> None:
    """The worker was as good as dead for a while; another has its items now."""
    runner.holds = True
    submit(office, 3)
    worker.start()
    await eventually(lambda: len(runner.running) == 3)
    office.queue.release_all("worker-1")
    taken = office.lease_all("b", "worker-2")
    assert len(taken) == 3
    await eventually(lambda: all(item.is_lost for item in runner.running))
    assert counted(office, leased=3)()
    assert office.queue.end([success_of(lease) for lease in taken]).num_effective == 3


async def test_a_database_that_is_away_only_delays(
    office: Office, worker: BatchWorker, monkeypatch: pytest.MonkeyPatch
) -> None:
    submit(office)
    end, num_calls = office.queue.end, 0

    def away_at_first(endings: Any) -> Any:
        nonlocal num_calls
        num_calls += 1
        if num_calls == 1:
            raise StoreAwayError("the database does not answer")
        return end(endings)

    monkeypatch.setattr(office.queue, "end", away_at_first)
    worker.start()
    await eventually(counted(office, succeeded=6))
    assert num_calls >= 2


async def test_an_end_that_cannot_be_written_holds_up_no_other(
    office: Office, worker: BatchWorker, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    submit(office)
    end = office.queue.end

    def refuses_one(endings: Any) -> Any:
        if any(ending.lease.position == 2 for ending in endings):
            raise ValueError("no database could write this")
        return end(endings)

    monkeypatch.setattr(office.queue, "end", refuses_one)
    worker.start()
    await eventually(lambda: office.archive.counts(["b"])["b"].succeeded == 5)
    await eventually(lambda: "could not be written" in caplog.text)
    monkeypatch.undo()
    office.clock.sleep(10)
    await eventually(counted(office, succeeded=6))
