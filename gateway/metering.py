"""Usage records become durable here, before a client sees the end of its answer.

The event loop gathers records as long as it is busy with more of them, for ``commit_interval_s`` at most, and
hands them to one thread, which writes all that wait as one group: one flush of the disk serves every request
that ended meanwhile. The record of a request that is alone is written without the thread, because the two
switches between threads cost half as much again as the flush. A record is either durable when
:meth:`UsageJournal.commit` returns, or it raises and the answer must not be given as complete.

Invariants: one record per request id; counts come from the engine (0 is a value); estimates are marked.
"""

from __future__ import annotations

import asyncio
import logging
import threading
import time
from collections.abc import Callable, Sequence
from queue import Empty, SimpleQueue
from typing import Protocol

from billing.spool import SpoolError
from billing.usage import UsageRecord
from gateway.config import MeteringConfig

_log = logging.getLogger(__name__)

_RETRY_AFTER_S = 1.0

CommitObserver = Callable[[int, float], None]
"""Told after each group: number of records, seconds that the commit took."""


class RecordSink(Protocol):
    """Where records become durable: the spool."""

    def append(self, records: Sequence[UsageRecord]) -> None:
        """All or none; blocks until they survive a crash. Raises SpoolError or OSError."""


class MeteringUnavailableError(RuntimeError):
    """The record is not known to be durable: the disk is full, failing, or too slow."""


class _Pending:
    __slots__ = ("committed_at", "done", "record")

    def __init__(self, record: UsageRecord, done: asyncio.Future[None], committed_at: float) -> None:
        self.record = record
        self.done = done
        self.committed_at = committed_at


class UsageJournal:
    """Group commit of usage records. Used by one event loop; owns one thread."""

    def __init__(
        self,
        sink: RecordSink,
        config: MeteringConfig,
        observe: CommitObserver = lambda size, seconds: None,
        *,
        num_in_flight: Callable[[], int] = lambda: 0,
        monotonic: Callable[[], float] = time.monotonic,
    ) -> None:
        self._sink = sink
        self._config = config
        self._num_in_flight = num_in_flight
        self._monotonic = monotonic
        self._observe = observe
        self._arrived: SimpleQueue[_Pending | None] = SimpleQueue()  # None: stop when all before it is done
        self._unfinished: set[_Pending] = set()
        self._gathering: list[_Pending] = []
        self._gathering_until = 0.0
        self._progress = (0, 0)
        self._typical_s = 0.0  # of recent commits, with a long memory for slow ones
        self._watch: asyncio.TimerHandle | None = None
        self._is_stopping = False
        self._failed_at: float | None = None
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
        self._is_stopping = True
        self._hand_over()
        self._arrived.put(None)
        await asyncio.to_thread(thread.join)
        self._thread = None
        if self._watch is not None:
            self._watch.cancel()

    @property
    def num_pending(self) -> int:
        """Records on their way to the disk."""
        return len(self._unfinished)

    @property
    def is_full(self) -> bool:
        """Whether new requests should be refused, because their records would be."""
        return len(self._unfinished) >= self._config.max_pending

    @property
    def is_failing(self) -> bool:
        """Whether the last write failed, so that an answer would be computed for nothing.

        A while after each failure one request may try again: only a write can show that the disk is back.
        """
        loop, failed_at = self._loop, self._failed_at
        if loop is None or failed_at is None:
            return False
        if loop.time() - failed_at < _RETRY_AFTER_S:
            return True
        self._failed_at = loop.time()
        return False

    @property
    def has_failed(self) -> bool:
        """Whether the last write failed."""
        return self._failed_at is not None

    async def commit(self, record: UsageRecord) -> None:
        """Return when ``record`` is durable.

        Cancelling the caller does not take the record back.

        Raises:
            MeteringUnavailableError: it is not durable, or not within ``commit_timeout_s``.
        """
        loop = self._loop
        if loop is None or self._is_stopping:
            raise MeteringUnavailableError("the journal is not running")
        if self.is_full:
            raise MeteringUnavailableError(f"{self.num_pending} records already wait for the disk")
        if self._is_alone():
            self._commit_here(record)
            return
        pending = _Pending(record, loop.create_future(), loop.time())
        self._unfinished.add(pending)
        self._gathering.append(pending)
        if len(self._gathering) == 1:
            self._gathering_until = self._monotonic() + self._config.commit_interval_s
            self._look_around(loop)
        if self._watch is None:
            self._watch = loop.call_later(self._config.commit_timeout_s / 4, self._give_up, loop)
        await pending.done

    # -- on the loop ---------------------------------------------------------------------------------------

    def _is_alone(self) -> bool:
        """Whether the loop may wait for the disk itself: nobody else is being served, and it is fast.

        A disk that stalls for the first time holds up the loop once; then the thread has it until it has
        long been fast again.
        """
        return (
            not self._unfinished
            and self._num_in_flight() == 1
            and self._typical_s < self._config.inline_commit_max_s
            and self._failed_at is None
        )

    def _commit_here(self, record: UsageRecord) -> None:
        started = self._monotonic()
        error = self._append([record])
        self._note(1, error, self._monotonic() - started)
        if error is not None:
            raise MeteringUnavailableError(str(error)) from error

    def _look_around(self, loop: asyncio.AbstractEventLoop) -> None:
        """Hand over what has gathered, unless the loop is still bringing more: waiting costs nothing then."""
        if not self._gathering:
            return
        progress = (len(self._gathering), self._num_in_flight())
        if (
            progress == self._progress
            or progress[0] >= self._config.max_group
            or progress[1] <= 1
            or self._monotonic() >= self._gathering_until
        ):
            self._hand_over()
        else:
            self._progress = progress
            loop.call_soon(self._look_around, loop)

    def _hand_over(self) -> None:
        gathered, self._gathering = self._gathering, []
        self._progress = (0, 0)
        for pending in gathered:
            self._arrived.put(pending)

    def _note(self, num_records: int, error: Exception | None, seconds: float) -> None:
        """Remember how the last commit went."""
        self._failed_at = None if error is None or self._loop is None else self._loop.time()
        self._typical_s = max(seconds, self._typical_s + (seconds - self._typical_s) / 16)
        if error is None:
            self._observe(num_records, seconds)

    def _give_up(self, loop: asyncio.AbstractEventLoop) -> None:
        """Fail what has waited too long: one timer for all is cheaper than one for each."""
        timeout_s = self._config.commit_timeout_s
        for pending in self._unfinished:
            if not pending.done.done() and loop.time() - pending.committed_at >= timeout_s:
                pending.done.set_exception(MeteringUnavailableError(f"not durable within {timeout_s:g} s"))
        self._watch = loop.call_later(timeout_s / 4, self._give_up, loop) if self._unfinished else None

    # -- the thread ----------------------------------------------------------------------------------------

    def _run(self) -> None:
        is_open = True
        while is_open:
            group, is_open = self._next_group()
            if group:
                started = self._monotonic()
                error = self._append([pending.record for pending in group])
                self._tell(group, error, self._monotonic() - started)

    def _next_group(self) -> tuple[list[_Pending], bool]:
        """Wait for records and take a group of them; False when the journal stops and nothing is left."""
        group: list[_Pending] = []
        pending = self._arrived.get()
        try:
            while pending is not None:
                group.append(pending)
                if len(group) >= self._config.max_group:
                    return group, True
                pending = self._arrived.get_nowait()
        except Empty:
            return group, True
        return group, False

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
        self._unfinished.difference_update(group)
        self._note(len(group), error, seconds)
        for pending in group:
            if pending.done.done():
                continue
            if error is None:
                pending.done.set_result(None)
            else:
                pending.done.set_exception(MeteringUnavailableError(str(error)))
