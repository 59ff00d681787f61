"""Cancelling, expiring, settling and deleting."""

from __future__ import annotations

import json

from sqlalchemy import func, select

from billing.batch_schema import batch_events, batch_items, batch_payloads, batches, file_chunks, files
from gateway.batches.events import encode_event
from gateway.batches.jobs import Batch, ItemCounts, Problem
from tests.support.batches import Office, chat_item, failure_of, new_batch, success_of
from tests.support.ledger import ACCOUNT, KIMI, OTHER_ACCOUNT


def batch_of(office: Office, batch_id: str = "b") -> Batch:
    batch = office.archive.find(ACCOUNT, batch_id)
    assert batch is not None
    return batch


def submit(office: Office, count: int, form: str = "openai", batch_id: str = "b") -> None:
    items = [chat_item(f"question {number}", f"ref-{number}") for number in range(count)]
    office.queue.submit(new_batch(batch_id, items, form=form))


def events_of(office: Office, batch_id: str = "b") -> list[str]:
    return [event.type.rpartition(".")[2] for event in office.archive.events(batch_id)]


def lines_of(office: Office, file_id: str) -> list[dict]:
    stored = office.files.find(ACCOUNT, file_id)
    assert stored is not None
    content = b"".join(office.files.content(stored))
    assert len(content) == stored.num_bytes
    return [json.loads(line) for line in content.splitlines()]


def test_a_batch_is_complete_when_its_last_item_has_ended(office: Office) -> None:
    submit(office, 3)
    leases = sorted(office.lease_all("b"), key=lambda lease: lease.position)
    result = office.queue.end([success_of(lease) for lease in leases[:2]])
    assert result.done_batch_ids == []
    assert office.closer.settle("b") is False
    assert office.queue.end([failure_of(leases[2])]).done_batch_ids == ["b"]
    assert office.closer.settle("b") is True
    assert office.closer.settle("b") is False
    batch = batch_of(office)
    assert (batch.status, batch.ended_at_us) == ("completed", office.clock.now_us)
    assert events_of(office) == ["queued", "succeeded"]
    output = lines_of(office, batch.output_file_id)
    assert sorted(line["custom_id"] for line in output) == ["ref-0", "ref-1"]
    assert {line["response"]["status_code"] for line in output} == {200}
    errors = lines_of(office, batch.error_file_id)
    assert [(line["custom_id"], line["response"]["status_code"]) for line in errors] == [("ref-2", 400)]
    assert len({line["id"] for line in (*output, *errors)}) == 3


def test_a_killed_process_leaves_no_batch_open(office: Office) -> None:
    """It died between the last item's end and the batch's."""
    submit(office, 2)
    office.queue.end([success_of(lease) for lease in office.lease_all("b")])
    assert batch_of(office).is_open
    assert office.closer.sweep() == 1
    assert batch_of(office).status == "completed"
    assert office.closer.sweep() == 0


def test_what_is_done_at_the_deadline_stays_done(office: Office) -> None:
    """One of ten was answered in time: one line of output, nine of errors, one bill."""
    submit(office, 10)
    (lease,) = office.lease_all("b", max_items=1)
    office.queue.end([success_of(lease)])
    office.clock.sleep(86_400)
    assert office.closer.sweep() == 1
    batch = batch_of(office)
    assert batch.status == "expired"
    assert events_of(office) == ["queued", "failed"]
    assert len(lines_of(office, batch.output_file_id)) == 1
    errors = lines_of(office, batch.error_file_id)
    assert len(errors) == 9
    assert {line["error"]["code"] for line in errors} == {"batch_expired"}
    assert {line["response"] for line in errors} == {None}
    assert office.archive.usage("b").prompt_tokens == 1_000


def test_what_runs_at_the_deadline_may_end(office: Office) -> None:
    submit(office, 2)
    (lease,) = office.lease_all("b", max_items=1)
    office.clock.sleep(86_400)
    assert office.closer.sweep() == 0
    assert office.queue.end([success_of(lease)]).num_effective == 1
    assert office.closer.sweep() == 1
    assert office.archive.counts(["b"])["b"] == ItemCounts(succeeded=1, expired=1)


def test_a_cancelled_batch_ends_even_when_its_worker_died(office: Office) -> None:
    """BR-79: cancelling must not hang."""
    submit(office, 64)
    leases = office.lease_all("b", max_items=30)
    office.queue.end([success_of(lease) for lease in leases[:27]])
    assert office.closer.cancel(ACCOUNT, "b") is True
    assert batch_of(office).status == "cancelling"
    assert office.closer.sweep() == 0
    office.clock.sleep(31)
    assert office.queue.reclaim_expired() == 3
    assert office.lease_all("b") == []
    assert office.closer.sweep() == 1
    batch = batch_of(office)
    assert batch.status == "cancelled"
    assert len(lines_of(office, batch.output_file_id)) == 27
    assert {line["error"]["code"] for line in lines_of(office, batch.error_file_id)} == {"batch_cancelled"}


def test_cancelling_what_has_not_begun_ends_it_at_once(office: Office) -> None:
    submit(office, 5)
    assert office.closer.cancel(OTHER_ACCOUNT, "b") is False
    assert office.closer.cancel(ACCOUNT, "b") is True
    assert batch_of(office).status == "cancelled"
    assert office.closer.cancel(ACCOUNT, "b") is False


def test_a_batch_with_problems_has_failed(office: Office) -> None:
    problems = [Problem(code="invalid_json_line", message="no JSON", line=3)]
    office.queue.submit(new_batch("b", [], form="openai", problems=problems))
    batch = batch_of(office)
    assert (batch.status, batch.is_open) == ("failed", False)
    assert json.loads(batch.problems) == [
        {"code": "invalid_json_line", "message": "no JSON", "line": 3, "param": None}
    ]
    assert events_of(office) == ["failed"]


def test_events_have_the_form_of_subscriptions(office: Office) -> None:
    submit(office, 1, "native")
    (event,) = office.archive.events("b")
    assert json.loads(encode_event(batch_of(office), event)) == {
        "type": "cf.workersAi.model.batch.queued",
        "source": {"type": "workersAi.model", "modelName": KIMI},
        "payload": {"requestId": "b"},
        "metadata": {
            "accountId": ACCOUNT,
            "eventSubscriptionId": "b",
            "eventSchemaVersion": 1,
            "eventTimestamp": "2026-11-30T12:00:00.000Z",
        },
    }


def test_nothing_is_left_after_the_retention(office: Office) -> None:
    submit(office, 2)
    upload = office.files.begin_upload()
    upload.add(b"lines\n")
    office.files.finish_upload(upload, ACCOUNT, "batch", "input.jsonl")
    abandoned = office.files.begin_upload()
    abandoned.add(b"half a fi")
    office.queue.end([success_of(lease) for lease in office.lease_all("b")])
    office.closer.settle("b")
    assert office.closer.delete_old() == 0
    office.clock.sleep(604_801)
    assert office.closer.delete_old() == 4
    with office.store.reading() as connection:
        for table in (batches, batch_items, batch_payloads, batch_events, files, file_chunks):
            assert connection.scalar(select(func.count()).select_from(table)) == 0, table.name
