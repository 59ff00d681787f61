"""Submitting, leasing, ending and giving back."""

from __future__ import annotations

import json
from concurrent.futures import ThreadPoolExecutor

import pytest
from sqlalchemy import func, select

from billing import schema
from billing.audit import audit
from gateway.batches.jobs import ItemCounts, Lease
from gateway.batches.queue import QueueFullError
from tests.support.batches import Office, chat_item, failure_of, new_batch, success_of
from tests.support.ledger import ACCOUNT, OTHER_ACCOUNT, book


def num_records(office: Office) -> int:
    with office.store.reading() as connection:
        return int(connection.scalar(select(func.count()).select_from(schema.usage_records)) or 0)


def items(count: int) -> list:
    return [chat_item(f"question {number}", f"ref-{number}") for number in range(count)]


class TestSubmitting:
    def test_items_wait_in_the_order_of_their_prompts(self, office: Office) -> None:
        texts = ["pear", "apple", "quince"]
        office.queue.submit(new_batch("b", [chat_item(text, system="Be brief." * 200) for text in texts]))
        leases = office.lease_all("b")
        assert [lease.position for lease in leases] == [1, 0, 2]
        assert len({lease.prefix_group for lease in leases}) == 1
        assert json.loads(leases[0].body)["messages"][1]["content"] == "apple"

    def test_an_account_may_have_so_many_batches_and_so_many_items(self, office: Office) -> None:
        with pytest.raises(QueueFullError, match="70 requests"):
            office.queue.submit(new_batch("large", items(71)))
        for number in range(5):
            office.queue.submit(new_batch(f"b{number}", items(1)))
        with pytest.raises(QueueFullError, match="5 batches"):
            office.queue.submit(new_batch("one-more", items(1)))
        office.queue.submit(new_batch("others", items(1), account_id=OTHER_ACCOUNT))
        office.queue.end([success_of(lease) for lease in office.lease_all("b0")])
        office.closer.settle("b0")
        office.queue.submit(new_batch("now", items(1)))

    def test_a_batch_begins_when_its_first_item_does(self, office: Office) -> None:
        office.queue.submit(new_batch("b", items(2)))
        batch = office.archive.find(ACCOUNT, "b")
        assert batch is not None
        assert (batch.status, batch.started_at_us) == ("queued", None)
        office.clock.sleep(5)
        office.lease_all("b", max_items=1)
        batch = office.archive.find(ACCOUNT, "b")
        assert batch is not None
        assert (batch.status, batch.started_at_us) == ("running", office.clock.now_us)

    def test_others_do_not_see_it(self, office: Office) -> None:
        office.queue.submit(new_batch("b", items(1)))
        assert office.archive.find(OTHER_ACCOUNT, "b") is None
        assert office.archive.newest(OTHER_ACCOUNT, max_batches=10) == []


class TestLeasing:
    def test_nobody_gets_what_another_has(self, office: Office) -> None:
        office.queue.submit(new_batch("b", items(50)))

        def work(owner: str) -> list[Lease]:
            return office.lease_all("b", owner)

        with ThreadPoolExecutor(4) as pool:
            leases = [lease for some in pool.map(work, ["w1", "w2", "w3", "w4"]) for lease in some]
        assert sorted(lease.position for lease in leases) == list(range(50))
        assert office.lease_all("b") == []

    def test_every_attempt_has_an_id_of_its_own_that_anyone_can_tell(self, office: Office) -> None:
        office.queue.submit(new_batch("b", items(20)))
        first = office.lease_all("b")
        office.clock.sleep(31)
        assert office.queue.reclaim_expired() == 20
        second = office.lease_all("b", "worker-2")
        ids = [lease.request_id for lease in (*first, *second)]
        assert len(set(ids)) == 40
        assert all(len(one) == 36 and one[14] == "7" and one[19] in "89ab" for one in ids)

    def test_a_renewed_lease_does_not_run_out(self, office: Office) -> None:
        office.queue.submit(new_batch("b", items(2)))
        held, lost = office.lease_all("b")
        office.clock.sleep(20)
        assert office.queue.renew("worker-1", [held, lost]) == {(*held.key, 1), (*lost.key, 1)}
        office.clock.sleep(20)
        assert office.queue.reclaim_expired() == 0

    def test_renewing_gives_back_what_nobody_works_at(self, office: Office) -> None:
        office.queue.submit(new_batch("b", items(2)))
        held, stray = office.lease_all("b")
        assert office.queue.renew("worker-1", [held]) == {(*held.key, 1)}
        assert [lease.position for lease in office.lease_all("b", "worker-2")] == [stray.position]

    def test_renewing_says_what_was_taken_back(self, office: Office) -> None:
        office.queue.submit(new_batch("b", items(1)))
        (lease,) = office.lease_all("b")
        office.clock.sleep(31)
        office.queue.reclaim_expired()
        office.lease_all("b", "worker-2")
        assert office.queue.renew("worker-1", [lease]) == set()

    def test_an_item_that_was_put_back_waits(self, office: Office) -> None:
        office.queue.submit(new_batch("b", items(1)))
        (lease,) = office.lease_all("b")
        office.queue.release(lease, delay_s=10, has_failed=True)
        assert office.lease_all("b") == []
        assert office.queue.runnable(10) == []
        office.clock.sleep(10)
        assert [batch.id for batch in office.queue.runnable(10)] == ["b"]
        (again,) = office.lease_all("b")
        assert (again.number, again.num_failures) == (2, 1)

    def test_a_successor_gives_back_what_its_predecessor_had(self, office: Office) -> None:
        office.queue.submit(new_batch("b", items(3)))
        first = office.queue.groups("b", "", 1)[0]
        office.queue.lease("b", first, "worker-2", 1)
        office.lease_all("b", "worker-1")
        assert office.queue.release_all("worker-1") == 2
        assert len(office.lease_all("b")) == 2

    def test_nothing_runs_past_the_deadline(self, office: Office) -> None:
        office.queue.submit(new_batch("b", items(1)))
        office.clock.sleep(86_400)
        assert office.queue.runnable(10) == []
        assert office.lease_all("b") == []


class TestEnding:
    def test_result_and_usage_come_together(self, office: Office) -> None:
        office.queue.submit(new_batch("b", items(3)))
        leases = office.lease_all("b")
        result = office.queue.end([success_of(leases[0]), success_of(leases[1]), failure_of(leases[2])])
        assert (result.num_effective, result.done_batch_ids) == (3, ["b"])
        assert num_records(office) == 2
        assert office.archive.counts(["b"])["b"] == ItemCounts(succeeded=2, failed=1)
        assert office.archive.usage("b").prompt_tokens == 2_000
        report = audit(office.store, book(), clock=office.clock)
        assert report.findings == []

    def test_a_late_end_has_no_effect_and_costs_nothing(self, office: Office) -> None:
        office.queue.submit(new_batch("b", items(1)))
        (late,) = office.lease_all("b", "worker-1")
        office.clock.sleep(31)
        office.queue.reclaim_expired()
        assert office.queue.end([success_of(late)]).num_effective == 0
        (current,) = office.lease_all("b", "worker-2")
        assert office.queue.end([success_of(late)]).num_effective == 0
        assert num_records(office) == 0
        assert office.queue.end([success_of(current)]).num_effective == 1
        assert office.queue.end([success_of(late), success_of(current)]).num_effective == 0
        assert num_records(office) == 1

    def test_a_late_worker_cannot_put_back_what_another_has(self, office: Office) -> None:
        office.queue.submit(new_batch("b", items(1)))
        (late,) = office.lease_all("b", "worker-1")
        office.clock.sleep(31)
        office.queue.reclaim_expired()
        (current,) = office.lease_all("b", "worker-2")
        office.queue.release(late, delay_s=0, has_failed=True)
        assert office.queue.end([success_of(current)]).num_effective == 1

    def test_all_or_nothing(self, office: Office, monkeypatch: pytest.MonkeyPatch) -> None:
        office.queue.submit(new_batch("b", items(2)))
        leases = office.lease_all("b")

        def break_down(*_: object) -> None:
            raise RuntimeError("killed")

        with monkeypatch.context() as patched:
            patched.setattr(office.store, "post_within", break_down)
            with pytest.raises(RuntimeError, match="killed"):
                office.queue.end([success_of(lease) for lease in leases])
        assert office.archive.counts(["b"])["b"] == ItemCounts(leased=2)
        assert num_records(office) == 0
        assert office.queue.end([success_of(lease) for lease in leases]).num_effective == 2
