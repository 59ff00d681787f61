"""Segment files of the spool: naming, reading, recovering, writing. No threads and no locks in here."""

from __future__ import annotations

import errno
import os
import re
from collections.abc import Iterator
from itertools import pairwise
from pathlib import Path

import msgspec

from billing.framing import SEGMENT_HEADER, frame_at, frames_from, has_frame_after, is_blank
from billing.usage import UsageRecord

_NAME = re.compile(r"(\d{12})\.spool", re.ASCII)
_NO_SPACE = frozenset({errno.ENOSPC, errno.EDQUOT, errno.EFBIG})
_WINDOW_BYTES = 1024 * 1024
_RECORDS = msgspec.msgpack.Decoder(list[UsageRecord])


class SpoolError(RuntimeError):
    """The journal cannot be opened or written; the message says why and what to do."""


class SpoolFullError(SpoolError):
    """The disk or the configured limit of unposted records is full. Nothing of the append counts."""


class SpoolCorruptError(SpoolError):
    """Acknowledged records were damaged on disk. Refused, because going on would lose bills silently."""


class Disk:
    """The two system calls that durability hangs on; a test hands in one that fails."""

    def write(self, descriptor: int, data: bytes, offset: int) -> int:
        return os.pwrite(descriptor, data, offset)

    def flush(self, descriptor: int) -> None:
        """Return when the file's bytes are on the medium."""
        os.fdatasync(descriptor)


class Segment(msgspec.Struct):
    """One file as its reader may see it: everything before ``size`` is durable; ``num_records`` are in it."""

    path: Path
    number: int
    size: int
    num_records: int


def segment_path(directory: Path, number: int) -> Path:
    return directory / f"{number:012d}.spool"


def list_segments(directory: Path) -> list[tuple[int, Path]]:
    """Numbers and paths, oldest first."""
    return sorted(
        (int(match.group(1)), directory / match.group(0))
        for match in map(_NAME.fullmatch, os.listdir(directory))
        if match is not None
    )


def recover_all(directory: Path) -> list[Segment]:
    """Check the segments that another process left, oldest first, and cut off what was never acknowledged.

    Raises:
        SpoolCorruptError: an acknowledged frame is damaged, or a segment between others is missing.
    """
    found = list_segments(directory)
    for (number, _), (following, _) in pairwise(found):
        if following != number + 1:
            raise SpoolCorruptError(
                f"{directory}: segment {number + 1} is missing while {number} and {following} exist; "
                "restore it from a backup before starting, so that no bill is lost"
            )
    return [_recover(path, number, is_newest=number == found[-1][0]) for number, path in found]


def read_frames(segment: Segment, position: int) -> Iterator[tuple[int, list[UsageRecord]]]:
    """The appends from ``position`` on, up to the end of the segment or of one window of reading.

    Each with the position in the file at which it ends. At least the first is read whole, however long.
    """
    remaining = segment.size - position
    with segment.path.open("rb", buffering=0) as file:
        data = os.pread(file.fileno(), min(remaining, _WINDOW_BYTES), position)
        if frame_at(data, 0) is None and len(data) < remaining:
            data = os.pread(file.fileno(), remaining, position)
    for found in frames_from(data, 0):
        yield position + found.end, _RECORDS.decode(data[found.start : found.end])


def _recover(path: Path, number: int, *, is_newest: bool) -> Segment:
    data = path.read_bytes()
    start = len(SEGMENT_HEADER)
    if not data.startswith(SEGMENT_HEADER):
        if not data or (is_newest and not has_frame_after(data, 0)):
            return _cut(path, number, 0, 0)  # killed while the file was being made
        raise SpoolCorruptError(f"{path}: does not begin like a segment; restore it from a backup")
    end, num_records = start, 0
    for found in frames_from(data, start):
        end = found.end
        num_records += found.num_records
    if not is_blank(data, end) and (not is_newest or has_frame_after(data, end)):
        raise SpoolCorruptError(
            f"{path}: damaged at byte {end}, behind {num_records} sound records; "
            "restore it from a backup before starting, so that no bill is lost"
        )
    return _cut(path, number, end, num_records)


def sync_directory(directory: Path) -> None:
    """Make creations in ``directory`` durable."""
    descriptor = os.open(directory, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def _cut(path: Path, number: int, size: int, num_records: int) -> Segment:
    if path.stat().st_size != size:
        descriptor = os.open(path, os.O_RDWR)
        try:
            os.ftruncate(descriptor, size)
            os.fsync(descriptor)
        finally:
            os.close(descriptor)
    return Segment(path, number, size, num_records)


class SegmentWriter:
    """Appends to one new segment file. Bytes are reserved ahead, as zeros: then a flush moves data only."""

    def __init__(self, directory: Path, number: int, reserve_bytes: int, disk: Disk) -> None:
        """Create the file, durably. Raises SpoolError; then it does not exist."""
        self.path = segment_path(directory, number)
        self.size = 0
        self.is_sealed = False
        self._is_broken = False
        self._disk = disk
        self._reserve_bytes = reserve_bytes
        self._reserved = 0
        try:
            flags = os.O_CREAT | os.O_EXCL | os.O_RDWR | os.O_CLOEXEC
            self._descriptor = os.open(self.path, flags, 0o600)
        except OSError as error:
            raise _explained(self.path, error) from error
        try:
            self.append(SEGMENT_HEADER)
            sync_directory(directory)
        except (SpoolError, OSError) as error:
            os.close(self._descriptor)
            self.path.unlink(missing_ok=True)
            if isinstance(error, OSError):
                raise _explained(self.path, error) from error
            raise

    def append(self, data: bytes) -> None:
        """Write and flush. Raises SpoolError; then the file ends where it ended before."""
        if self._is_broken:
            raise SpoolError(f"{self.path}: the disk failed and could not be set right; restart to recover")
        end = self.size + len(data)
        try:
            if end > self._reserved:
                self._reserve(end)
            self._write_all(data, self.size)
        except OSError as error:
            self._take_back()
            raise _explained(self.path, error) from error
        try:
            self._disk.flush(self._descriptor)
        except OSError as error:
            # After a failed flush a second one on the same file may lie: what follows goes to a new file.
            self.is_sealed = True
            self._take_back()
            raise _explained(self.path, error) from error
        self.size = end

    def close(self) -> None:
        """Give back what was reserved and not used. Raises SpoolError."""
        try:
            os.ftruncate(self._descriptor, self.size)
            os.fsync(self._descriptor)
        except OSError as error:
            raise _explained(self.path, error) from error
        finally:
            os.close(self._descriptor)

    def _reserve(self, end: int) -> None:
        target = end + self._reserve_bytes
        self._write_all(bytes(target - self._reserved), self._reserved)
        self._reserved = target

    def _write_all(self, data: bytes, offset: int) -> None:
        written = self._disk.write(self._descriptor, data, offset)
        while written < len(data):
            written += self._disk.write(self._descriptor, data[written:], offset + written)

    def _take_back(self) -> None:
        """Make the file end, durably, where the last acknowledged append ended."""
        self._reserved = self.size
        try:
            os.ftruncate(self._descriptor, self.size)
            os.fsync(self._descriptor)
        except OSError:
            self._is_broken = True


def _explained(path: Path, error: OSError) -> SpoolError:
    if error.errno in _NO_SPACE:
        return SpoolFullError(f"{path}: no space left for usage records; free some disk space")
    return SpoolError(f"{path}: {error.strerror or error}")
