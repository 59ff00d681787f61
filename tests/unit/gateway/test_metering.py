"""Group commit of usage records."""

from __future__ import annotations

import asyncio
import threading
import time
from collections.abc import AsyncIterator, Sequence

import pytest

from billing.spool import SpoolError
from billing.usage import UsageRecord
from gateway.config import MeteringConfig
from gateway.metering import MeteringUnavailableError, UsageJournal


def record(request_id: str) -> UsageRecord:
    return UsageRecord(
        request_id=request_id,
        account_id="a" * 32,
        token_id="t",
        model="m",
        requested_model="m",
        surface="v1",
        started_at_us=1,
        finished_at_us=2,
        prompt_tokens=1,
        cached_prompt_tokens=0,
        completion_tokens=1,
    )


class Disk:
    """A sink that can be held up, and can fail."""

    def __init__(self) -> None:
        self.groups: list[list[str]] = []
        self.is_free = threading.Event()
        self.is_free.set()
        self.error: Exception | None = None

    def append(self, records: Sequence[UsageRecord]) -> None:
        self.is_free.wait(5)
        if self.error is not None:
            raise self.error
        self.groups.append([one.request_id for one in records])

    @property
    def written(self) -> list[str]:
        return [request_id for group in self.groups for request_id in group]


@pytest.fixture
def disk() -> Disk:
    return Disk()


@pytest.fixture
async def journal(disk: Disk) -> AsyncIterator[UsageJournal]:
    journal = UsageJournal(disk, MeteringConfig(max_group=10, max_pending=25, commit_timeout_s=0.3))
    journal.start()
    yield journal
    disk.is_free.set()
    await journal.stop()


async def test_a_commit_returns_when_the_record_is_written(journal: UsageJournal, disk: Disk) -> None:
    await journal.commit(record("r1"))
    assert disk.written == ["r1"]
    assert journal.num_pending == 0


async def test_what_waits_for_the_disk_shares_a_group_within_the_limit(
    journal: UsageJournal, disk: Disk
) -> None:
    disk.is_free.clear()
    waiting = [asyncio.create_task(journal.commit(record(f"r{index}"))) for index in range(22)]
    await asyncio.sleep(0.05)
    assert journal.num_pending == 22
    disk.is_free.set()
    await asyncio.gather(*waiting)
    assert disk.written == [f"r{index}" for index in range(22)], "in order, each once"
    assert max(len(group) for group in disk.groups) <= 10
    assert len(disk.groups) <= 4


@pytest.mark.parametrize("error", [SpoolError("full"), OSError(28, "No space left on device")])
async def test_a_failed_write_is_told_to_every_record_of_the_group(
    journal: UsageJournal, disk: Disk, error: Exception
) -> None:
    disk.error = error
    results = await asyncio.gather(
        *(journal.commit(record(f"r{index}")) for index in range(5)), return_exceptions=True
    )
    assert all(isinstance(result, MeteringUnavailableError) for result in results)
    disk.error = None
    await journal.commit(record("later"))
    assert disk.written == ["later"]


async def test_a_disk_that_hangs_is_given_up_on(journal: UsageJournal, disk: Disk) -> None:
    disk.is_free.clear()
    started = time.monotonic()
    with pytest.raises(MeteringUnavailableError, match="not durable within"):
        await journal.commit(record("r1"))
    assert time.monotonic() - started < 1
    disk.is_free.set()


async def test_the_queue_is_bounded(journal: UsageJournal, disk: Disk) -> None:
    disk.is_free.clear()
    waiting = [asyncio.create_task(journal.commit(record(f"r{index}"))) for index in range(25)]
    await asyncio.sleep(0.02)
    assert journal.is_full
    with pytest.raises(MeteringUnavailableError, match="already wait"):
        await journal.commit(record("one too many"))
    disk.is_free.set()
    await asyncio.gather(*waiting)
    assert not journal.is_full


async def test_a_cancelled_caller_does_not_take_its_record_back(journal: UsageJournal, disk: Disk) -> None:
    disk.is_free.clear()
    leaving = asyncio.create_task(journal.commit(record("r1")))
    await asyncio.sleep(0.02)
    leaving.cancel()
    await asyncio.gather(leaving, return_exceptions=True)
    disk.is_free.set()
    await journal.commit(record("r2"))
    assert disk.written == ["r1", "r2"]


async def test_a_stop_writes_what_waits_and_takes_nothing_more(disk: Disk) -> None:
    journal = UsageJournal(disk, MeteringConfig(max_group=3))
    journal.start()
    disk.is_free.clear()
    waiting = [asyncio.create_task(journal.commit(record(f"r{index}"))) for index in range(8)]
    await asyncio.sleep(0.02)
    stopping = asyncio.create_task(journal.stop())
    await asyncio.sleep(0.02)
    disk.is_free.set()
    await stopping
    await asyncio.gather(*waiting)
    assert disk.written == [f"r{index}" for index in range(8)]
    with pytest.raises(MeteringUnavailableError, match="not running"):
        await journal.commit(record("late"))


async def test_a_commit_waits_while_the_loop_brings_more(disk: Disk) -> None:
    num_in_flight = 2
    config = MeteringConfig(commit_interval_s=5.0)
    journal = UsageJournal(disk, config, num_in_flight=lambda: num_in_flight)
    journal.start()
    first = asyncio.create_task(journal.commit(record("r1")))
    for _ in range(5):
        num_in_flight += 1
        await asyncio.sleep(0)
    second = asyncio.create_task(journal.commit(record("r2")))
    num_in_flight += 1
    await asyncio.gather(first, second)
    assert disk.groups == [["r1", "r2"]]
    await journal.stop()


async def test_a_commit_waits_for_its_interval_at_most(disk: Disk) -> None:
    num_in_flight = 2
    config = MeteringConfig(commit_interval_s=0.02)
    journal = UsageJournal(disk, config, num_in_flight=lambda: num_in_flight)
    journal.start()
    commit = asyncio.create_task(journal.commit(record("r1")))
    started = time.monotonic()
    while not commit.done():
        num_in_flight += 1
        await asyncio.sleep(0)
    assert 0.02 <= time.monotonic() - started < 1.0
    await journal.stop()


async def test_a_quiet_loop_does_not_let_a_commit_wait(disk: Disk) -> None:
    journal = UsageJournal(disk, MeteringConfig(commit_interval_s=5.0), num_in_flight=lambda: 20)
    journal.start()
    await asyncio.wait_for(journal.commit(record("r1")), timeout=1.0)
    await journal.stop()


class WatchedDisk(Disk):
    """Knows which thread wrote, and takes as long as it is told to, by a clock of its own."""

    def __init__(self) -> None:
        super().__init__()
        self.threads: list[str] = []
        self.seconds = 0.0
        self.now = 0.0

    def monotonic(self) -> float:
        return self.now

    def append(self, records: Sequence[UsageRecord]) -> None:
        self.threads.append("loop" if threading.current_thread() is threading.main_thread() else "journal")
        self.now += self.seconds
        super().append(records)


async def test_a_lone_request_is_committed_on_the_loop_while_the_disk_is_fast() -> None:
    disk = WatchedDisk()
    seen: list[int] = []
    journal = UsageJournal(
        disk,
        MeteringConfig(inline_commit_max_s=0.01),
        lambda size, seconds: seen.append(size),
        num_in_flight=lambda: 1,
        monotonic=disk.monotonic,
    )
    journal.start()
    await journal.commit(record("r1"))
    disk.seconds = 0.02
    await journal.commit(record("r2"))  # cannot be known to be slow beforehand
    await journal.commit(record("r3"))
    disk.seconds = 0.0
    await journal.commit(record("r4"))  # fast once is not fast again
    for index in range(40):
        await journal.commit(record(f"fast{index}"))
    assert disk.threads[:4] == ["loop", "loop", "journal", "journal"]
    assert disk.threads[-1] == "loop"
    assert len(disk.written) == sum(seen) == 44
    await journal.stop()


async def test_a_request_in_company_leaves_the_loop_free() -> None:
    disk = WatchedDisk()
    journal = UsageJournal(disk, MeteringConfig(), num_in_flight=lambda: 2)
    journal.start()
    await journal.commit(record("r1"))
    assert disk.threads == ["journal"]
    await journal.stop()


async def test_a_failed_commit_on_the_loop_raises_and_leaves_the_next_to_the_thread() -> None:
    disk = WatchedDisk()
    disk.error = SpoolError("no space left")
    journal = UsageJournal(disk, MeteringConfig(), num_in_flight=lambda: 1)
    journal.start()
    with pytest.raises(MeteringUnavailableError, match="no space left"):
        await journal.commit(record("r1"))
    assert journal.is_failing
    disk.error = None
    await journal.commit(record("r2"))
    assert disk.threads == ["loop", "journal"]
    assert not journal.has_failed
    await journal.stop()


async def test_commits_are_observed() -> None:
    seen: list[tuple[int, float]] = []
    journal = UsageJournal(Disk(), MeteringConfig(), lambda size, seconds: seen.append((size, seconds)))
    journal.start()
    await journal.commit(record("r1"))
    await journal.stop()
    ((size, seconds),) = seen
    assert size == 1
    assert 0 <= seconds < 1
