"""``kill -9`` of gateways at random, a full disk and a database that goes away, while requests are served.

The suite makes do with a few hundred requests; EMBERGATE_CHAOS_REQUESTS=5000 takes as many as one likes.
"""

from __future__ import annotations

import asyncio
import os
import random
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import suppress
from pathlib import Path

import pytest
from sqlalchemy import func, select

from billing import schema
from billing.audit import audit
from billing.rates import RateBook
from billing.store import Store
from embergate.dev_account import DevAccount
from tests.support.chat import ChatClient, Outcome
from tests.support.databases import STORES
from tests.support.fleet import Fleet
from tests.support.gateway_harness import ACCOUNT, MODEL, TOKEN
from tests.support.postgres import PostgresMissingError, PostgresServer
from tests.support.trouble import Database, Killer, LockedSqlite, RestartedPostgres, SmallDisk, can_mount
from tests.support.waiting import eventually

pytestmark = [pytest.mark.chaos, pytest.mark.slow, pytest.mark.timeout(1_800)]

NUM_REQUESTS = int(os.environ.get("EMBERGATE_CHAOS_REQUESTS", "400"))
NUM_USERS = 16
MIN_KILLS = 3
AWAY_S = 2.5
DISK_BYTES = 512 * 1024
SPOOL = {"max_segment_bytes": 32_768, "reserve_bytes": 8_192, "retry_max_s": 0.5}
"""Small enough to fit on a small disk, a few segments of it."""


@pytest.fixture(params=STORES)
def server(request: pytest.FixtureRequest) -> Iterator[PostgresServer | None]:
    """A server of this test's own, whose commits are durable; None for SQLite."""
    if request.param == "sqlite":
        yield None
        return
    try:
        server = PostgresServer(is_flushing=True)
    except PostgresMissingError as error:
        if os.environ.get("EMBERGATE_REQUIRE_POSTGRES"):
            raise
        pytest.skip(str(error))
    try:
        server.start()
        server.create("ledger")
        yield server
    finally:
        server.remove()


@pytest.fixture
def disk(tmp_path: Path) -> Iterator[SmallDisk]:
    """Where the first gateway keeps its journal."""
    why_not = can_mount(tmp_path / "probe")
    if why_not:
        pytest.skip(why_not)
    disk = SmallDisk(tmp_path / "gateway-0" / "spool", DISK_BYTES)
    yield disk
    disk.remove()


@pytest.fixture
def fleet(tmp_path: Path, server: PostgresServer | None, disk: SmallDisk) -> Iterator[Fleet]:
    fleet = Fleet(
        tmp_path,
        num_gateways=3,
        num_replicas=2,
        token_delay_s=0.02,
        database_url="" if server is None else server.url("ledger"),
        spool=SPOOL,
    )
    fleet.start()
    yield fleet
    fleet.stop()


@pytest.fixture
def database(fleet: Fleet, server: PostgresServer | None) -> Database:
    return LockedSqlite(fleet.home / "ledger.db") if server is None else RestartedPostgres(server)


class Crowd:
    """Users who ask whichever gateway comes to mind until enough was answered."""

    def __init__(self, fleet: Fleet, draw: random.Random) -> None:
        self._clients = [
            ChatClient(DevAccount(fleet.root_url(name), ACCOUNT, TOKEN), timeout_s=30)
            for name in fleet.gateways
        ]
        self._draw = draw
        self.outcomes: list[Outcome] = []
        self.has_seen_all = False

    @property
    def answered(self) -> list[Outcome]:
        return [outcome for outcome in self.outcomes if outcome.is_complete]

    async def ask(self) -> None:
        """Returns when NUM_REQUESTS requests were answered and there is no trouble to come."""
        for client in self._clients:
            await client.__aenter__()
        try:
            await asyncio.gather(*(self._use(user) for user in range(NUM_USERS)))
        finally:
            for client in self._clients:
                await client.__aexit__()

    async def _use(self, user: int) -> None:
        while len(self.answered) < NUM_REQUESTS or not self.has_seen_all:
            client = self._draw.choice(self._clients)
            question = [{"role": "user", "content": f"User {user}, question {len(self.outcomes)}"}]
            outcome = await client.complete(
                MODEL, question, session=f"user-{user}", stream=self._draw.random() < 0.5
            )
            self.outcomes.append(outcome)
            if not outcome.is_complete:
                await asyncio.sleep(0.05)

    def count(self, is_so: Callable[[Outcome], bool]) -> int:
        return sum(map(is_so, self.outcomes))


async def cause_trouble(crowd: Crowd, database: Database, disk: SmallDisk, killer: Killer) -> None:
    """Once each, while much is left to do."""
    await eventually(lambda: len(crowd.answered) >= NUM_REQUESTS * 0.25, timeout_s=900)
    await database.vanish(AWAY_S)
    await eventually(lambda: len(crowd.answered) >= NUM_REQUESTS * 0.5, timeout_s=900)
    await disk.fill(lambda: crowd.count(is_refused_for_the_disk) >= 3, timeout_s=60)
    await eventually(lambda: killer.killed.total() >= MIN_KILLS, timeout_s=120)
    crowd.has_seen_all = True


async def test_every_answer_is_in_the_ledger_once(fleet: Fleet, database: Database, disk: SmallDisk) -> None:
    draw = random.Random(20261201)
    crowd, killer = Crowd(fleet, draw), Killer(fleet, draw)
    killing = asyncio.create_task(killer.work())
    trouble = asyncio.create_task(cause_trouble(crowd, database, disk, killer))
    await asyncio.gather(crowd.ask(), trouble)
    killing.cancel()
    with suppress(asyncio.CancelledError):
        await killing
    print(f"\n{len(crowd.answered)} answered, killed {dict(killer.killed)}, {dict(kinds_of(crowd))}")
    assert_errors_are_clear(crowd)
    await killer.until_all_listen()  # a process that is told to stop while it starts posts nothing
    await asyncio.to_thread(fleet.stop)
    assert_books_are_right(fleet, crowd)


def is_refused_for_the_disk(outcome: Outcome) -> bool:
    return outcome.status == 503 and "usage" in outcome.error.lower()


def kinds_of(crowd: Crowd) -> Counter[str]:
    """What became of the requests that were not answered."""
    return Counter(
        f"{outcome.status} {outcome.error[:60]}" for outcome in crowd.outcomes if not outcome.is_complete
    )


def assert_errors_are_clear(crowd: Crowd) -> None:
    """A client is told to come again, or sees that the gateway died; nothing is blamed on it."""
    for outcome in crowd.outcomes:
        if not outcome.is_complete:
            assert outcome.error, outcome
            assert outcome.status in (0, 200, 429, 503), outcome


def assert_books_are_right(fleet: Fleet, crowd: Crowd) -> None:
    """One record and one transaction for each answer that a client saw the end of, with what it saw."""
    store = Store.open(fleet.database_url)
    try:
        with store.reading() as connection:
            rows = {row.request_id: row for row in connection.execute(select(schema.usage_records))}
            transactions = schema.ledger_transactions.c
            charges = Counter(connection.scalars(select(transactions.id)))
            num_counted = connection.scalar(select(func.sum(schema.rollup_days.c.num_requests)))
        missing = [one.request_id for one in crowd.answered if one.request_id not in rows]
        assert missing == [], fleet.logs()
        for outcome in crowd.answered:
            row = rows[outcome.request_id]
            assert row.status == "ok"
            assert charges[outcome.request_id] == 1
            assert (row.prompt_tokens, row.cached_prompt_tokens, row.completion_tokens) == (
                outcome.prompt_tokens,
                outcome.cached_tokens,
                outcome.completion_tokens,
            )
        assert num_counted == len(rows)
        for spool_dir in fleet.spool_dirs:
            report = audit(
                store, RateBook.from_config(fleet.billing), spool_directory=spool_dir, in_flight_grace_s=0
            )
            assert report.findings == []
    finally:
        store.close()
