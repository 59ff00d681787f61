"""How batches come to an end: cancelled, expired, complete; and how what is left of them is deleted.

Every step is found again in the store by the next sweep of any gateway, so a process that dies between two of
them leaves nothing stuck. Blocking; thread-safe; raises StoreError.
"""

from __future__ import annotations

from collections.abc import Callable

from sqlalchemy import Connection, delete, exists, insert, select, update

from billing.batch_schema import batch_events, batch_items, batch_payloads, batches, file_chunks, files
from billing.store import Store
from gateway.batches.archive import batch_of, counts_in, ended_items_in
from gateway.batches.config import BatchesConfig
from gateway.batches.events import add_event, event_of
from gateway.batches.jobs import OPEN_STATES, OPEN_STATUSES, Batch, BatchStatus, ItemCounts, ItemState
from gateway.batches.outputs import output_of_ended
from gateway.batches.queue import now_us

SUCCESS_STATES: tuple[ItemState, ...] = ("succeeded",)
ERROR_STATES: tuple[ItemState, ...] = ("failed", "expired", "cancelled")
OUTPUT_PURPOSE = "batch_output"

_MICROS = 1_000_000
_MAX_DELETED_PER_SWEEP = 20
_STALE_UPLOAD_US = 24 * 3600 * _MICROS
_BATCH, _ITEM, _FILE, _CHUNK = batches.c, batch_items.c, files.c, file_chunks.c


class BatchCloser:
    """See the module."""

    def __init__(self, store: Store, config: BatchesConfig, clock: Callable[[], int] = now_us) -> None:
        """``clock`` returns UTC microseconds."""
        self._store = store
        self._retention_us = int(config.retention_s * _MICROS)
        self._clock = clock

    def cancel(self, account_id: str, batch_id: str) -> bool:
        """Run no more items of a batch; those that run now end and count. False when it had ended, or never
        was.
        """
        now = self._clock()
        with self._store.writing() as connection:
            num_cancelled = connection.execute(
                update(batches)
                .where(
                    _BATCH.id == batch_id,
                    _BATCH.account_id == account_id,
                    _BATCH.status.in_(("queued", "running")),
                )
                .values(status="cancelling", cancelling_at_us=now)
            ).rowcount
            if num_cancelled:
                _end_queued(connection, batch_id, "cancelled")
        self.settle(batch_id)
        return bool(num_cancelled)

    def sweep(self) -> int:
        """Take every batch as far as it has come; returns how many have ended by it."""
        now = self._clock()
        is_due = (_BATCH.expires_at_us <= now) | (_BATCH.status == "cancelling")
        has_queued = exists().where(_ITEM.batch_id == _BATCH.id, _ITEM.state == "queued")
        has_open = exists().where(_ITEM.batch_id == _BATCH.id, _ITEM.state.in_(OPEN_STATES))
        is_open = _BATCH.status.in_(OPEN_STATUSES)
        with self._store.reading() as connection:
            over = connection.execute(
                select(_BATCH.id, _BATCH.status).where(is_open, is_due, has_queued)
            ).all()
        for batch_id, status in over:
            with self._store.writing() as connection:
                _end_queued(connection, batch_id, "cancelled" if status == "cancelling" else "expired")
        with self._store.reading() as connection:
            done = list(connection.scalars(select(_BATCH.id).where(is_open, ~has_open)))
        return sum(self.settle(batch_id) for batch_id in done)

    def settle(self, batch_id: str) -> bool:
        """Give a batch whose items have all ended its final status, its files and its event."""
        now = self._clock()
        with self._store.writing() as connection:
            row = connection.execute(
                select(batches)
                .where(_BATCH.id == batch_id, _BATCH.status.in_(OPEN_STATUSES))
                .with_for_update()
            ).one_or_none()
            if row is None:
                return False
            batch, counts = batch_of(row), counts_in(connection, [batch_id])[batch_id]
            if counts.num_open:
                return False
            status = _final_status(batch, counts)
            file_ids = self._add_files(connection, batch, counts, now) if batch.form == "openai" else {}
            connection.execute(
                update(batches)
                .where(_BATCH.id == batch_id)
                .values(status=status, ended_at_us=now, **file_ids)
            )
            add_event(connection, batch_id, event_of(status), now)
        return True

    def delete_old(self) -> int:
        """Delete what is past its retention, a little at a time; returns how many batches and files."""
        now = self._clock()
        old_batches = (
            select(_BATCH.id)
            .where(_BATCH.ended_at_us < now - self._retention_us)
            .limit(_MAX_DELETED_PER_SWEEP)
        )
        old_files = select(_FILE.id).where(_FILE.expires_at_us < now).limit(_MAX_DELETED_PER_SWEEP)
        is_visible = exists().where(_FILE.id == _CHUNK.file_id)
        stale_uploads = (
            select(_CHUNK.file_id)
            .where(_CHUNK.created_at_us < now - _STALE_UPLOAD_US, ~is_visible)
            .distinct()
            .limit(_MAX_DELETED_PER_SWEEP)
        )
        with self._store.reading() as connection:
            batch_ids = list(connection.scalars(old_batches))
            file_ids = [*connection.scalars(old_files), *connection.scalars(stale_uploads)]
        for batch_id in batch_ids:
            with self._store.writing() as connection:
                for table in (batch_payloads, batch_items, batch_events, files):
                    connection.execute(delete(table).where(table.c.batch_id == batch_id))
                connection.execute(delete(batches).where(_BATCH.id == batch_id))
        for file_id in file_ids:
            with self._store.writing() as connection:
                connection.execute(delete(files).where(_FILE.id == file_id))
                connection.execute(delete(file_chunks).where(_CHUNK.file_id == file_id))
        return len(batch_ids) + len(file_ids)

    def _add_files(
        self, connection: Connection, batch: Batch, counts: ItemCounts, now: int
    ) -> dict[str, str]:
        """Files of the batch's lines; the lines themselves stay where they are."""
        made: dict[str, str] = {}
        has_errors = counts.failed + counts.expired + counts.cancelled > 0
        for column, word, states, is_wanted in (
            ("output_file_id", "output", SUCCESS_STATES, counts.succeeded > 0),
            ("error_file_id", "error", ERROR_STATES, has_errors),
        ):
            if not is_wanted:
                continue
            file_id = f"file-{batch.id.removeprefix('batch_')}-{word}"
            row = {
                "id": file_id,
                "account_id": batch.account_id,
                "purpose": OUTPUT_PURPOSE,
                "name": f"{batch.id}_{word}.jsonl",
                "batch_id": batch.id,
                "num_bytes": _num_bytes(connection, batch, states),
                "created_at_us": now,
                "expires_at_us": now + self._retention_us,
            }
            connection.execute(insert(files), row)
            made[column] = file_id
        return made


def _end_queued(connection: Connection, batch_id: str, state: ItemState) -> None:
    connection.execute(
        update(batch_items).where(_ITEM.batch_id == batch_id, _ITEM.state == "queued").values(state=state)
    )


def _final_status(batch: Batch, counts: ItemCounts) -> BatchStatus:
    if batch.status == "cancelling":
        return "cancelled"
    return "expired" if counts.expired else "completed"


def _num_bytes(connection: Connection, batch: Batch, states: tuple[ItemState, ...]) -> int:
    total, after = 0, -1
    while page := ended_items_in(connection, batch.id, states, after):
        total += sum(len(output_of_ended(batch, item)) + 1 for item in page)
        after = page[-1].position
    return total
