"""The disk tier's thread: reads before writes, behind a queue that drops rather than holds anybody up.

Domain: a block that waits to be written can be read already. Whatever the disk does wrong ends here: a write
that fails pauses writing, a read that fails gives None, and both are counted.

State shared between the threads: the two queues and the contents that wait, under one lock.
"""

from __future__ import annotations

import logging
import threading
import time
from collections import OrderedDict, deque
from collections.abc import Iterable
from concurrent.futures import Future
from dataclasses import dataclass

from backend.transfer.disk import DiskTier
from backend.transfer.payload import BadRecordError

RETRY_AFTER_S = 60.0
"""How long nothing is written after a write failed: a full disk is emptied by somebody sometime."""

_logger = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class Loaded:
    """What a read gave: None where there was nothing that could be trusted. ``seconds`` are of the read."""

    content: bytes | None
    seconds: float


class TierThread:
    """Owns a :class:`DiskTier` from here on. At most ``max_queue_bytes`` wait to be written."""

    def __init__(self, disk: DiskTier, max_queue_bytes: int, retry_after_s: float = RETRY_AFTER_S) -> None:
        self._disk = disk
        self._max_queue_bytes = max_queue_bytes
        self._retry_after_s = retry_after_s
        self._wake = threading.Condition()
        self._reads: deque[tuple[bytes, Future[Loaded]]] = deque()
        self._writes: OrderedDict[bytes, bytes] = OrderedDict()
        self._queue_bytes = 0
        self._is_busy = False
        self._is_closing = False
        self._paused_until_s = 0.0
        self.num_written = self.num_read = self.num_corrupt = self.num_failures = self.num_dropped = 0
        self._thread = threading.Thread(target=self._run, name="kv-disk-tier", daemon=True)
        self._thread.start()

    @property
    def is_writing(self) -> bool:
        """Whether the disk takes blocks at the moment."""
        return time.monotonic() >= self._paused_until_s

    @property
    def room_bytes(self) -> int:
        """How much can be queued now beside what is evicted, for which half of the queue is left."""
        return max(self._max_queue_bytes // 2 - self._queue_bytes, 0)

    @property
    def num_blocks(self) -> int:
        return len(self._disk)

    @property
    def num_bytes(self) -> int:
        return self._disk.num_bytes

    def holds(self, digest: bytes) -> bool:
        return digest in self._writes or self._disk.holds(digest)

    def touch(self, digest: bytes) -> bool:
        """Make a block that is here the most recently used; False when it is not here."""
        return digest in self._writes or self._disk.touch(digest)

    def write(self, digest: bytes, content: bytes) -> bool:
        """Have a block written sometime; False when it is dropped, as the queue is full or the disk is."""
        with self._wake:
            if digest in self._writes:
                return True
            if not self.is_writing or self._queue_bytes + len(content) > self._max_queue_bytes:
                self.num_dropped += 1
                return False
            self._writes[digest] = content
            self._queue_bytes += len(content)
            self._wake.notify_all()
            return True

    def read(self, digest: bytes) -> Future[Loaded]:
        """Have a block read; the future never fails."""
        future: Future[Loaded] = Future()
        with self._wake:
            waiting = self._writes.get(digest)
            if waiting is not None:
                future.set_result(Loaded(waiting, 0.0))
            elif self._is_closing:
                future.set_result(Loaded(None, 0.0))
            else:
                self._reads.append((digest, future))
                self._wake.notify_all()
        return future

    def drain(self, timeout_s: float) -> bool:
        """Wait until nothing is left to do, at most ``timeout_s``; whether so."""
        with self._wake:
            return self._wake.wait_for(
                lambda: not (self._reads or self._writes or self._is_busy), timeout=timeout_s
            )

    def close(self, flush_s: float, last: Iterable[tuple[bytes, bytes]] = ()) -> None:
        """Write what waits, and then ``last``, for at most about ``flush_s``; stop and close the file."""
        until_s = time.monotonic() + flush_s
        self.drain(flush_s)
        for digest, content in last:
            if not self.drain(until_s - time.monotonic()) or not self.write(digest, content):
                break
        self.drain(max(until_s - time.monotonic(), 0.0))
        with self._wake:
            self._is_closing = True
            self._writes.clear()
            self._wake.notify_all()
        self._thread.join()
        for _, future in self._reads:
            future.set_result(Loaded(None, 0.0))
        self._disk.close()

    def _run(self) -> None:
        while True:
            with self._wake:
                self._is_busy = False
                self._wake.notify_all()
                self._wake.wait_for(lambda: self._reads or self._writes or self._is_closing)
                if self._is_closing:
                    return
                self._is_busy = True
                read = self._reads.popleft() if self._reads else None
                digest, content = (b"", b"") if read else next(iter(self._writes.items()))
            if read:
                self._read(*read)
            else:
                self._write(digest, content)

    def _read(self, digest: bytes, future: Future[Loaded]) -> None:
        started_at_s = time.monotonic()
        content: bytes | None = None
        try:
            content = self._disk.read(digest)
            self.num_read += content is not None
        except BadRecordError as error:
            self.num_corrupt += 1
            _logger.error("a block of the disk tier is corrupt and will be computed again: %s", error)
        except OSError as error:
            self.num_failures += 1
            _logger.error("a block of the disk tier cannot be read: %s", error.strerror)
        future.set_result(Loaded(content, time.monotonic() - started_at_s))

    def _write(self, digest: bytes, content: bytes) -> None:
        try:
            if self.is_writing:
                self._disk.write(digest, content)
                self.num_written += 1
            else:
                self.num_dropped += 1
        except OSError as error:
            self.num_failures += 1
            self._paused_until_s = time.monotonic() + self._retry_after_s
            _logger.error(
                "the disk tier takes no blocks for %g s, requests go on without it: %s",
                self._retry_after_s,
                error.strerror,
            )
        with self._wake:
            if self._writes.pop(digest, None) is not None:
                self._queue_bytes -= len(content)
