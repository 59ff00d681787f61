"""Whatever workers do, and whenever they die: every item ends once, and is billed once if it succeeded."""

from __future__ import annotations

import shutil
import tempfile
from pathlib import Path

import pytest
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, rule, run_state_machine_as_test
from sqlalchemy import select

from billing import schema
from billing.audit import audit
from billing.batch_schema import batch_items
from billing.store import Store
from gateway.batches.config import BatchesConfig
from gateway.batches.jobs import Lease
from tests.support.batches import Clock, Office, chat_item, failure_of, new_batch, success_of
from tests.support.ledger import ACCOUNT, book

WORKERS = st.sampled_from(["worker-1", "worker-2", "worker-3"])
CONFIG = BatchesConfig(max_open_items=10_000, max_open_batches=1_000)
ENDED = frozenset(("succeeded", "failed", "expired", "cancelled"))


class Workers(RuleBasedStateMachine):
    """Workers remember every lease that they ever got, and use old ones as readily as new ones."""

    template: Path

    def __init__(self) -> None:
        super().__init__()
        self.directory = Path(tempfile.mkdtemp())
        shutil.copy(self.template, self.directory / "ledger.db")
        self.clock = Clock()
        self.store = Store.open(f"sqlite:///{self.directory / 'ledger.db'}", clock=self.clock)
        self.office = Office.on(self.store, CONFIG, self.clock)
        self.leases: list[Lease] = []
        self.ended: dict[tuple[str, int], str] = {}
        self.num_batches = 0

    @initialize()
    def begin(self) -> None:
        self.submit_one()

    @rule()
    def submit(self) -> None:
        self.submit_one()

    def submit_one(self) -> None:
        self.num_batches += 1
        items = [chat_item(f"question {number % 2}" * 200) for number in range(4)]
        self.office.queue.submit(new_batch(f"b{self.num_batches}", items))

    @rule(owner=WORKERS, number=st.integers(1, 3), which=st.integers(0, 100))
    def lease(self, owner: str, number: int, which: int) -> None:
        batch_id = f"b{which % self.num_batches + 1}"
        held = {key for key, state in self.states().items() if state == "leased"}
        taken = self.office.lease_all(batch_id, owner, number)
        assert len(taken) <= number
        assert not held & {lease.key for lease in taken}
        assert not self.ended.keys() & {lease.key for lease in taken}
        self.leases += taken

    @rule(which=st.lists(st.integers(0, 100), min_size=1, max_size=3), is_success=st.booleans())
    def end(self, which: list[int], is_success: bool) -> None:
        if self.leases:
            chosen = {index % len(self.leases) for index in which}
            make = success_of if is_success else failure_of
            self.office.queue.end([make(self.leases[index]) for index in sorted(chosen)])

    @rule(which=st.integers(0, 100), has_failed=st.booleans())
    def release(self, which: int, has_failed: bool) -> None:
        if self.leases:
            lease = self.leases[which % len(self.leases)]
            self.office.queue.release(lease, delay_s=1.0, has_failed=has_failed)

    @rule(owner=WORKERS)
    def renew_all_that_it_remembers(self, owner: str) -> None:
        self.office.queue.renew(owner, self.leases)

    @rule(owner=WORKERS)
    def restart(self, owner: str) -> None:
        self.office.queue.release_all(owner)

    @rule(seconds=st.sampled_from([1, 10, 31]))
    def sleep(self, seconds: int) -> None:
        self.clock.sleep(seconds)
        self.office.queue.reclaim_expired()

    @rule(which=st.integers(0, 100))
    def cancel(self, which: int) -> None:
        self.office.closer.cancel(ACCOUNT, f"b{which % self.num_batches + 1}")

    @rule()
    def sweep(self) -> None:
        self.office.closer.sweep()

    @invariant()
    def an_end_is_for_ever(self) -> None:
        states = self.states()
        assert all(states[key] == state for key, state in self.ended.items())
        self.ended = {key: state for key, state in states.items() if state in ENDED}

    @invariant()
    def one_record_for_each_success_and_no_other(self) -> None:
        with self.store.reading() as connection:
            recorded = set(connection.scalars(select(schema.usage_records.c.request_id)))
            ids = select(batch_items.c.request_id).where(batch_items.c.state == "succeeded")
            succeeded = list(connection.scalars(ids))
        assert sorted(recorded) == sorted(succeeded)

    def states(self) -> dict[tuple[str, int], str]:
        columns = batch_items.c
        with self.store.reading() as connection:
            rows = connection.execute(select(columns.batch_id, columns.position, columns.state))
            return {(row.batch_id, row.position): row.state for row in rows}

    def teardown(self) -> None:
        """Nothing is stuck: one worker that lives brings everything to an end."""
        self.clock.sleep(31)
        self.office.queue.reclaim_expired()
        for number in range(1, self.num_batches + 1):
            leases = self.office.lease_all(f"b{number}", "survivor")
            self.office.queue.end([success_of(lease) for lease in leases])
        self.office.closer.sweep()
        assert set(self.states().values()) <= ENDED
        found = self.office.archive.newest(ACCOUNT, max_batches=1_000)
        assert len(found) == self.num_batches
        assert not any(batch.is_open for batch in found)
        assert audit(self.store, book(), clock=self.clock).findings == []
        self.store.close()
        shutil.rmtree(self.directory)


@pytest.mark.slow
def test_every_item_ends_once_and_is_billed_once(empty_ledger: Path) -> None:
    Workers.template = empty_ledger
    run_state_machine_as_test(
        Workers,
        settings=settings(
            max_examples=15,
            stateful_step_count=25,
            deadline=None,
            suppress_health_check=[HealthCheck.too_slow, HealthCheck.data_too_large],
        ),
    )
