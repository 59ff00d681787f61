"""The durable journal between the edge and the store: what is appended here will be billed, once.

Append-only segment files of CRC-framed groups of records. An append is one write and one ``fdatasync``; when
it returns, the records survive the process and the machine. One process at a time may have a spool open.

Records leave in order: :meth:`Spool.read_batch`, then :meth:`Spool.mark_posted` once the store has them. A
process that dies between the two leaves them to its successor, so a record may be read twice; the store takes
it once.
"""

from __future__ import annotations

import fcntl
import os
import threading
from collections import deque
from collections.abc import Iterator, Sequence
from pathlib import Path

import msgspec

from billing.config import SpoolConfig
from billing.framing import SEGMENT_HEADER, frame
from billing.segments import (
    Disk,
    Segment,
    SegmentWriter,
    SpoolCorruptError,
    SpoolError,
    SpoolFullError,
    list_segments,
    read_frames,
    recover_all,
)
from billing.usage import UsageRecord

__all__ = [
    "Batch",
    "Spool",
    "SpoolCorruptError",
    "SpoolError",
    "SpoolFullError",
    "SpoolLockedError",
    "read_spooled",
]

_LOCK_NAME = "spool.lock"


class SpoolLockedError(SpoolError):
    """Another process has this spool open."""


class Batch(msgspec.Struct, frozen=True):
    """Records in the order of their appending; the next batch begins at ``end`` of the segment."""

    records: list[UsageRecord]
    segment_number: int
    end: int


class _Open(msgspec.Struct, frozen=True):
    """The segment that grows, and its writer."""

    writer: SegmentWriter
    segment: Segment


class Spool:
    """Thread-safe for any number of appenders and one reader."""

    def __init__(self, directory: Path, config: SpoolConfig, disk: Disk | None = None) -> None:
        """Lock ``directory`` (made when missing) and recover what a killed process left in it.

        Raises:
            SpoolLockedError: another process has it open.
            SpoolCorruptError: acknowledged records are damaged or missing.
            SpoolError: the directory cannot be used.
        """
        self.config = config
        self.directory = directory
        self._disk = disk or Disk()
        self._encoder = msgspec.msgpack.Encoder()
        self._append_lock = threading.Lock()
        self._state_lock = threading.Lock()
        self._waiting = threading.Event()
        self._open: _Open | None = None
        self._is_closed = False
        self._lock_descriptor = _lock(directory)
        try:
            self._segments = deque(recover_all(directory))
        except OSError as error:
            os.close(self._lock_descriptor)
            raise SpoolError(f"{directory}: {error.strerror or error}") from error
        except SpoolError:
            os.close(self._lock_descriptor)
            raise
        self._next_number = self._segments[-1].number + 1 if self._segments else 1
        self._read_position = len(SEGMENT_HEADER)
        self._num_unposted = sum(segment.num_records for segment in self._segments)
        self._drop_posted()
        if self._num_unposted:
            self._waiting.set()

    @property
    def num_unposted(self) -> int:
        """Records appended and not yet posted."""
        return self._num_unposted

    def append(self, records: Sequence[UsageRecord]) -> None:
        """Make the records durable, all or none. Blocks for one disk flush.

        Raises:
            SpoolFullError: the disk, or ``max_unposted_records``, is full.
            SpoolError: the disk failed. After any of these, none of ``records`` counts.
        """
        if not records:
            return
        framed = frame(self._encoder.encode(records), len(records))
        with self._append_lock:
            if self._num_unposted + len(records) > self.config.max_unposted_records:
                raise SpoolFullError(
                    f"{self.directory}: {self._num_unposted} usage records wait for the store, "
                    f"max_unposted_records is {self.config.max_unposted_records}; is the database available?"
                )
            opened = self._open_for(len(framed))
            opened.writer.append(framed)
            with self._state_lock:
                opened.segment.size = opened.writer.size
                opened.segment.num_records += len(records)
                self._num_unposted += len(records)
        if not self._waiting.is_set():  # the reader clears it before it looks at the count
            self._waiting.set()

    def wait(self, timeout_s: float) -> bool:
        """Block until records wait to be posted, or the time is over."""
        return self._waiting.wait(timeout_s)

    def wake(self) -> None:
        """End a :meth:`wait` early."""
        self._waiting.set()

    def read_batch(self, max_records: int) -> Batch | None:
        """The oldest unposted records: whole appends, at least one, as long as ``max_records`` allows.

        Raises:
            SpoolCorruptError: what was written can no longer be read.
        """
        self._waiting.clear()
        with self._state_lock:
            if not self._num_unposted:
                return None
            self._drop_posted()
            segment = msgspec.structs.replace(self._segments[0])
            position = self._read_position
        batch = self._read(segment, position, max_records)
        self._waiting.set()
        return batch

    def mark_posted(self, batch: Batch) -> None:
        """The store has this batch, the last one read. A segment of which all is posted is deleted."""
        with self._state_lock:
            if not self._segments or self._segments[0].number != batch.segment_number:
                raise SpoolError(
                    f"{self.directory}: batch of segment {batch.segment_number} is not the oldest"
                )
            self._read_position = batch.end
            self._num_unposted -= len(batch.records)
            self._drop_posted()

    def close(self) -> None:
        """Release the lock; delete segments of which everything is posted. Closing twice is free."""
        with self._append_lock, self._state_lock:
            if self._is_closed:
                return
            self._is_closed = True
            try:
                opened, self._open = self._open, None
                if opened is not None:
                    opened.writer.close()
                self._drop_posted()
            finally:
                os.close(self._lock_descriptor)

    def _read(self, segment: Segment, position: int, max_records: int) -> Batch:
        records: list[UsageRecord] = []
        end = position
        for append_end, appended in read_frames(segment, position):
            if records and len(records) + len(appended) > max_records:
                break
            records.extend(appended)
            end = append_end
        if end == position:
            raise SpoolCorruptError(f"{segment.path}: damaged at byte {position} after it was written")
        return Batch(records, segment.number, end)

    def _open_for(self, num_bytes: int) -> _Open:
        """The segment to append to; a new one when there is none or the present one is full or failed."""
        if self._is_closed:
            raise SpoolError(f"{self.directory}: the spool is closed")
        current = self._open
        if current is not None:
            writer = current.writer
            if not writer.is_sealed and writer.size + num_bytes <= self.config.max_segment_bytes:
                return current
            with self._state_lock:
                self._open = None
            writer.close()
        number = self._next_number
        writer = SegmentWriter(self.directory, number, self.config.reserve_bytes, self._disk)
        opened = _Open(writer, Segment(writer.path, number, writer.size, 0))
        with self._state_lock:
            self._open = opened
            self._next_number = number + 1
            self._segments.append(opened.segment)
        return opened

    def _drop_posted(self) -> None:
        """Delete leading segments that are read to their end and will not grow."""
        while self._segments:
            segment = self._segments[0]
            is_growing = self._open is not None and segment is self._open.segment
            if is_growing or (segment.num_records and self._read_position < segment.size):
                return
            segment.path.unlink(missing_ok=True)
            self._segments.popleft()
            self._read_position = len(SEGMENT_HEADER)


def read_spooled(directory: Path) -> Iterator[UsageRecord]:
    """Every sound record now in a spool, posted or not, without opening it: for an audit beside the edge."""
    if not directory.is_dir():
        return
    for number, path in list_segments(directory):
        start = len(SEGMENT_HEADER)
        try:
            segment = Segment(path, number, path.stat().st_size, 0)
            while start < segment.size:
                position = start
                for append_end, records in read_frames(segment, position):
                    yield from records
                    start = append_end
                if start == position:
                    break  # reserved bytes, or an append that is being written now
        except FileNotFoundError:
            continue  # posted and deleted meanwhile


def _lock(directory: Path) -> int:
    try:
        directory.mkdir(parents=True, exist_ok=True)
        descriptor = os.open(directory / _LOCK_NAME, os.O_CREAT | os.O_RDWR | os.O_CLOEXEC, 0o600)
    except OSError as error:
        raise SpoolError(f"{directory}: {error.strerror or error}") from error
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError:
        owner = os.pread(descriptor, 32, 0).decode("ascii", "replace").strip() or "unknown"
        os.close(descriptor)
        raise SpoolLockedError(
            f"{directory}: in use by process {owner}; each gateway needs a data directory of its own"
        ) from None
    os.ftruncate(descriptor, 0)
    os.pwrite(descriptor, f"{os.getpid()}\n".encode(), 0)
    return descriptor
