"""The event log of batches, in the words of Workers AI's event subscriptions.

An event is written in the transaction that makes it true, so none is missing and none is early.
"""

from __future__ import annotations

from datetime import UTC, datetime

import msgspec
from sqlalchemy import Connection, func, insert, select

from billing.batch_schema import batch_events
from gateway.batches.jobs import Batch, BatchEvent, BatchStatus

_PREFIX = "cf.workersAi.model.batch."
QUEUED = _PREFIX + "queued"
_SUCCEEDED = _PREFIX + "succeeded"
_FAILED = _PREFIX + "failed"


def event_of(status: BatchStatus) -> str:
    """The event that a batch's final status makes."""
    return _SUCCEEDED if status == "completed" else _FAILED


def add_event(connection: Connection, batch_id: str, event_type: str, at_us: int) -> None:
    """Append to the log of one batch, within the connection's transaction."""
    last = select(func.max(batch_events.c.number)).where(batch_events.c.batch_id == batch_id)
    number = (connection.scalar(last) or 0) + 1
    row = {"batch_id": batch_id, "number": number, "type": event_type, "at_us": at_us}
    connection.execute(insert(batch_events), row)


def encode_event(batch: Batch, event: BatchEvent) -> bytes:
    """One event as subscribers of Workers AI know it."""
    at = datetime.fromtimestamp(event.at_us / 1_000_000, UTC).isoformat(timespec="milliseconds")
    return msgspec.json.encode(
        {
            "type": event.type,
            "source": {"type": "workersAi.model", "modelName": batch.model},
            "payload": {"requestId": batch.id},
            "metadata": {
                "accountId": batch.account_id,
                "eventSubscriptionId": batch.id,
                "eventSchemaVersion": 1,
                "eventTimestamp": at.replace("+00:00", "Z"),
            },
        }
    )
