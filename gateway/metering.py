"""Usage records become durable here, before a client sees the end of its answer.

The event loop hands records to one thread, which writes all that wait as one group: one flush of the disk
serves every request that ended meanwhile. A record is either durable when :meth:`UsageJournal.commit`
returns, or it raises and the answer must not be given as complete.

Invariants: one record per request id; counts come from the engine (0 is a value); estimates are marked.
"""

from __future__ import annotations

import asyncio
import logging
import threading
import time
from collections.abc import Callable, Sequence
from typing import Protocol

from billing.spool import SpoolError
from billing.usage import UsageRecord
from gateway.config import MeteringConfig

_log = logging.getLogger(__name__)

CommitObserver = Callable[[int, float], None]
"""Told after each group: number of records, seconds that the commit took."""


class RecordSink(Protocol):
    """Where records become durable: the spool."""

    def append(self, records: Sequence[UsageRecord]) -> None:
        """All or none; blocks until they survive a crash. Raises SpoolError or OSError."""


class MeteringUnavailableError(RuntimeError):
    """The record is not known to be durable: the disk is full, failing, or too slow."""


class _Pending:
    __slots__ = ("done", "record")

    def __init__(self, record: UsageRecord, done: asyncio.Future[None]) -> None:
        self.record = record
        self.done = done


class UsageJournal:
    """Group commit of usage records. Used by one event loop; owns one thread."""

    def __init__(
        self, sink: RecordSink, config: MeteringConfig, observe: CommitObserver = lambda size, seconds: None
    ) -> None:
        self._sink = sink
        self._config = config
        self._observe = observe
        self._arrived = threading.Condition()
        self._pending: list[_Pending] = []
        self._num_unfinished = 0
        self._is_stopping = False
        self._thread: threading.Thread | None = None
        self._loop: asyncio.AbstractEventLoop | None = None

    def start(self) -> None:
        """Start the committing thread. Call inside the event loop."""
        self._loop = asyncio.get_running_loop()
        self._thread = threading.Thread(target=self._run, name="usage-journal", daemon=True)
        self._thread.start()

    async def stop(self) -> None:
        """Commit what waits, then end the thread."""
        thread = self._thread
        if thread is None:
            return
        with self._arrived:
            self._is_stopping = True
            self._arrived.notify()
        await asyncio.to_thread(thread.join)
        self._thread = None

    @property
    def num_pending(self) -> int:
        """Records on their way to the disk."""
        return self._num_unfinished

    @property
    def is_full(self) -> bool:
        """Whether new requests should be refused, because their records would be."""
        return self._num_unfinished >= self._config.max_pending

    async def commit(self, record: UsageRecord) -> None:
        """Return when ``record`` is durable.

        Cancelling the caller does not take the record back.

        Raises:
            MeteringUnavailableError: it is not durable, or not within ``commit_timeout_s``.
        """
        loop = self._loop
        if loop is None or self._is_stopping:
            raise MeteringUnavailableError("the journal is not running")
        if self._num_unfinished >= self._config.max_pending:
            raise MeteringUnavailableError(f"{self._num_unfinished} records already wait for the disk")
        pending = _Pending(record, loop.create_future())
        self._num_unfinished += 1
        with self._arrived:
            self._pending.append(pending)
            self._arrived.notify()
        timer = loop.call_later(self._config.commit_timeout_s, self._give_up, pending)
        try:
            await asyncio.shield(pending.done)
        finally:
            timer.cancel()

    def _give_up(self, pending: _Pending) -> None:
        if not pending.done.done():
            pending.done.set_exception(
                MeteringUnavailableError(f"not durable within {self._config.commit_timeout_s:g} s")
            )

    # -- the thread ----------------------------------------------------------------------------------------

    def _run(self) -> None:
        while group := self._next_group():
            started = time.monotonic()
            error = self._append([pending.record for pending in group])
            self._tell(group, error, time.monotonic() - started)

    def _next_group(self) -> list[_Pending]:
        """Wait for records and take a group of them; empty when the journal stops and nothing is left."""
        with self._arrived:
            while not self._pending and not self._is_stopping:
                self._arrived.wait()
        if self._config.commit_interval_s and not self._is_stopping:
            time.sleep(self._config.commit_interval_s)
        with self._arrived:
            group = self._pending[: self._config.max_group]
            del self._pending[: self._config.max_group]
        return group

    def _append(self, records: list[UsageRecord]) -> Exception | None:
        try:
            self._sink.append(records)
        except (SpoolError, OSError) as error:
            _log.error("usage records cannot be written: %s", error)
            return error
        return None

    def _tell(self, group: list[_Pending], error: Exception | None, seconds: float) -> None:
        loop = self._loop
        if loop is None or loop.is_closed():
            return
        loop.call_soon_threadsafe(self._resolve, group, error, seconds)

    def _resolve(self, group: list[_Pending], error: Exception | None, seconds: float) -> None:
        self._num_unfinished -= len(group)
        for pending in group:
            if pending.done.done():
                continue
            if error is None:
                pending.done.set_result(None)
            else:
                pending.done.set_exception(MeteringUnavailableError(str(error)))
        if error is None:
            self._observe(len(group), seconds)
