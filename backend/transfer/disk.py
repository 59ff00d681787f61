"""The disk tier: records of KV blocks in one file of equal slots, found again after a restart.

Domain: a slot is a write number and a record (:mod:`backend.transfer.payload`), whose header names layout and
block and whose checksum covers both and the content. The file belongs to one layout, whose digest is its
name, and to one process, which holds a lock on it.

State: which block lies in which slot, least recently used first, in memory only. It is read back from the
slots' headers at the start; the write numbers give the order.

Durability: this is a cache, so nothing is synced. A process that dies leaves its writes to the system; what a
power failure tears is noticed by its checksum when it is read, and the block is computed again.

Invariants: a digest names at most one slot; a slot is free or named by one digest; a record is in the index
only after it was written whole. The file is never larger than ``max_bytes``.

Torch-free. Methods may be called from several threads; reads and writes of contents only from one.
"""

from __future__ import annotations

import fcntl
import logging
import os
import struct
import threading
from collections import OrderedDict
from collections.abc import Callable
from pathlib import Path

from backend.transfer.payload import (
    HEADER_BYTES,
    BadRecordError,
    CorruptRecordError,
    KvLayout,
    digest_in_header,
    read_record,
    write_record,
)

_NUMBER = struct.Struct("<Q")
_SUFFIX = ".kvblocks"
_PROGRESS_SLOTS = 4096
_logger = logging.getLogger(__name__)

Progress = Callable[[int, int], None]
"""Takes how many slots were looked at, and how many there are."""


class DiskTier:
    """See the module. Use :meth:`open`."""

    def __init__(self, descriptor: int, layout: KvLayout, num_slots: int) -> None:
        self._descriptor = descriptor
        self._layout = layout
        self._num_slots = num_slots
        self._slot_bytes = _NUMBER.size + layout.record_bytes
        self._buffer = bytearray(self._slot_bytes)
        self._lock = threading.Lock()
        self._slots: OrderedDict[bytes, int] = OrderedDict()
        self._free: list[int] = []
        self._num_touched = 0
        self._last_number = 0

    @classmethod
    def open(
        cls, directory: Path, layout: KvLayout, max_bytes: int, progress: Progress = lambda done, total: None
    ) -> DiskTier:
        """Open or make the file for ``layout`` and find what is in it. Files of other layouts are removed:
        they could not be read any more, and the room is this one's.

        Raises:
            OSError: the directory cannot be used, or another process uses it.
            ValueError: ``max_bytes`` is less than one block needs.
        """
        num_slots = max_bytes // (_NUMBER.size + layout.record_bytes)
        if num_slots < 1:
            raise ValueError(f"{max_bytes} bytes are less than a block of {layout.record_bytes}")
        directory.mkdir(mode=0o700, parents=True, exist_ok=True)
        path = directory / f"{layout.digest.hex()}{_SUFFIX}"
        descriptor = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
            for other in directory.glob(f"*{_SUFFIX}"):
                if other != path:
                    other.unlink(missing_ok=True)
            tier = cls(descriptor, layout, num_slots)
            tier._scan(progress)
        except BaseException:
            os.close(descriptor)
            raise
        return tier

    def __len__(self) -> int:
        return len(self._slots)

    @property
    def num_bytes(self) -> int:
        """Bytes of the file that hold blocks."""
        return len(self._slots) * self._slot_bytes

    def touch(self, digest: bytes) -> bool:
        """Make a block the most recently used; False when it is not here."""
        with self._lock:
            if digest not in self._slots:
                return False
            self._slots.move_to_end(digest)
            return True

    def holds(self, digest: bytes) -> bool:
        return digest in self._slots

    def write(self, digest: bytes, content: bytes) -> None:
        """Write a block, over the least recently used one when the tier is full.

        Raises:
            OSError: the disk did not take it; the block is not here then, nor is the one it was to replace.
        """
        if self.touch(digest):
            return
        slot = self._take_slot()
        try:
            self._last_number += 1
            _NUMBER.pack_into(self._buffer, 0, self._last_number)
            write_record(memoryview(self._buffer)[_NUMBER.size :], self._layout, digest, memoryview(content))
            self._write_at(slot * self._slot_bytes, memoryview(self._buffer))
        except BaseException:
            with self._lock:
                self._free.append(slot)
            raise
        with self._lock:
            self._slots[digest] = slot

    def read(self, digest: bytes) -> bytes | None:
        """The content of a block; None when it is not here.

        Raises:
            BadRecordError: it is not what was written. It is forgotten.
            OSError: it cannot be read. It is forgotten.
        """
        slot = self._slots.get(digest)
        if slot is None:
            return None
        try:
            data = os.pread(self._descriptor, self._slot_bytes, slot * self._slot_bytes)
            if len(data) < self._slot_bytes:
                raise CorruptRecordError("the file ends within the record")
            content = bytes(read_record(memoryview(data)[_NUMBER.size :], self._layout, digest).content)
        except (BadRecordError, OSError):
            self._forget(digest, slot)
            raise
        self.touch(digest)
        return content

    def close(self) -> None:
        """Let go of the file."""
        os.close(self._descriptor)

    def _take_slot(self) -> int:
        with self._lock:
            if self._free:
                return self._free.pop()
            if self._num_touched < self._num_slots:
                self._num_touched += 1
                return self._num_touched - 1
            _, slot = self._slots.popitem(last=False)
            return slot

    def _write_at(self, offset: int, data: memoryview) -> None:
        while data:
            written = os.pwrite(self._descriptor, data, offset)
            offset += written
            data = data[written:]

    def _forget(self, digest: bytes, slot: int) -> None:
        """Free a slot with a bad record, so that the next start does not find it either."""
        with self._lock:
            if self._slots.pop(digest, None) is not None:
                self._free.append(slot)
        try:
            self._write_at(slot * self._slot_bytes, memoryview(bytes(_NUMBER.size + HEADER_BYTES)))
        except OSError as error:
            _logger.warning("a bad record could not be wiped from the disk tier: %s", error.strerror)

    def _scan(self, progress: Progress) -> None:
        """Read every slot's header. A slot that was torn is free, or fails its checksum later."""
        os.ftruncate(
            self._descriptor,
            min(os.fstat(self._descriptor).st_size, self._num_slots * self._slot_bytes),
        )
        size = os.fstat(self._descriptor).st_size
        total = self._num_touched = size // self._slot_bytes
        found: list[tuple[int, bytes, int]] = []
        for slot in range(total):
            if slot % _PROGRESS_SLOTS == 0:
                progress(slot, total)
            head = os.pread(self._descriptor, _NUMBER.size + HEADER_BYTES, slot * self._slot_bytes)
            digest = digest_in_header(memoryview(head)[_NUMBER.size :], self._layout)
            if digest is None:
                self._free.append(slot)
            else:
                found.append((_NUMBER.unpack_from(head)[0], digest, slot))
        for number, digest, slot in sorted(found):
            if (older := self._slots.pop(digest, None)) is not None:
                self._free.append(older)
            self._slots[digest] = slot
            self._last_number = number
        progress(total, total)
