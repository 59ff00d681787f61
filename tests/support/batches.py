"""Submissions, stores and clocks for tests of the batch queue."""

from __future__ import annotations

import json
from dataclasses import dataclass
from typing import Any

from billing.store import Store
from billing.usage import UsageRecord
from gateway.batches.archive import BatchArchive
from gateway.batches.closing import BatchCloser
from gateway.batches.config import BatchesConfig
from gateway.batches.files import FileStore
from gateway.batches.jobs import Ending, Form, Lease, NewBatch, NewItem
from gateway.batches.outputs import output_of
from gateway.batches.queue import BatchQueue
from tests.support.ledger import ACCOUNT, KIMI, NOON_US, book, record

MICROS = 1_000_000


class Clock:
    """UTC microseconds that pass when a test says so."""

    def __init__(self, now_us: int = NOON_US) -> None:
        self.now_us = now_us

    def __call__(self) -> int:
        return self.now_us

    def sleep(self, seconds: float) -> None:
        self.now_us += int(seconds * MICROS)


def chat_item(text: str, reference: str | None = None, system: str = "") -> NewItem:
    """A chat with one user message."""
    messages = [{"role": "system", "content": system}] if system else []
    body = {"messages": [*messages, {"role": "user", "content": text}]}
    return NewItem(body=json.dumps(body).encode(), reference=json.dumps(reference).encode())


def new_batch(batch_id: str, items: list[NewItem], **changes: Any) -> NewBatch:
    """A native submission of the first account."""
    form: Form = changes.pop("form", "native")
    fields: dict[str, Any] = {
        "id": batch_id,
        "account_id": ACCOUNT,
        "token_id": "token-1",
        "form": form,
        "endpoint": "/ai/run" if form == "native" else "/v1/chat/completions",
        "model": KIMI,
        "items": items,
    }
    return NewBatch(**(fields | changes))


def record_of(lease: Lease, **changes: Any) -> UsageRecord:
    """The usage record of a lease that was served."""
    fields = {"request_id": lease.request_id, "account_id": lease.account_id, "surface": "batch"}
    return record(**(fields | changes))


def success_of(lease: Lease) -> Ending:
    body = json.dumps({"answer_to": lease.position}).encode()
    return Ending(
        lease=lease,
        is_success=True,
        output=output_of(lease, 200, body, message=""),
        record=record_of(lease),
    )


def failure_of(lease: Lease) -> Ending:
    output = output_of(lease, 400, b'{"error":{"message":"wrong"}}', message="5006: wrong")
    return Ending(lease=lease, is_success=False, output=output)


@dataclass
class Office:
    """Everything that works on one store."""

    store: Store
    queue: BatchQueue
    closer: BatchCloser
    archive: BatchArchive
    files: FileStore
    clock: Clock

    @classmethod
    def on(cls, store: Store, config: BatchesConfig, clock: Clock) -> Office:
        archive = BatchArchive(store)
        return cls(
            store,
            BatchQueue(store, book(), config, clock),
            BatchCloser(store, config, clock),
            archive,
            FileStore(store, archive, config, clock),
            clock,
        )

    def lease_all(self, batch_id: str, owner: str = "worker-1", max_items: int = 1_000) -> list[Lease]:
        """Lease items of all groups."""
        leases: list[Lease] = []
        after = ""
        while groups := self.queue.groups(batch_id, after, 100):
            for group in groups:
                leases += self.queue.lease(batch_id, group, owner, max_items - len(leases))
            after = groups[-1]
        return leases
