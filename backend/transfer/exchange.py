"""The memory through which blocks leave and enter an engine process: slots of one record each.

The engine creates it as an anonymous file, so it goes with the last process that has it open. The replica's
HTTP process opens it, and so may another replica's of the same user on the same machine, which then copies
records without a socket in between. Who opens it compares the proof in its first bytes with what it was told.
"""

from __future__ import annotations

import mmap
import os
import secrets

from backend.engine.messages import ExchangeInfo
from backend.transfer.payload import KvLayout

PROOF_BYTES = 32
_PAGE = 4096


class ExchangeError(OSError):
    """The memory cannot be opened here."""


class Exchange:
    """The slots, mapped into this process."""

    def __init__(self, info: ExchangeInfo, memory: mmap.mmap) -> None:
        self.info = info
        self._memory = memory
        self._view = memoryview(memory)

    def slot(self, number: int) -> memoryview:
        """The memory of one slot.

        Raises:
            ExchangeError: when there is no such slot.
        """
        info = self.info
        if not 0 <= number < info.num_slots:
            raise ExchangeError(f"there is no slot {number}")
        start = _PAGE + number * info.slot_bytes
        return self._view[start : start + info.slot_bytes]

    def close(self) -> None:
        """Unmap it. Slots must not be used any more."""
        self._view.release()
        self._memory.close()


def create_exchange(layout: KvLayout, buffer_bytes: int) -> Exchange:
    """Make the memory, a half of it for each direction.

    Raises:
        ValueError: when it could not hold two records.
    """
    num_slots = buffer_bytes // layout.record_bytes
    if num_slots < 2:
        raise ValueError(
            f"transfer.buffer_mib: a block takes {layout.record_bytes} bytes and two must fit; "
            f"set it to {-(-2 * layout.record_bytes // 2**20)} or more"
        )
    descriptor = os.memfd_create("embergate-exchange", os.MFD_CLOEXEC)
    proof = secrets.token_bytes(PROOF_BYTES)
    os.ftruncate(descriptor, _PAGE + num_slots * layout.record_bytes)
    os.pwrite(descriptor, proof, 0)
    info = ExchangeInfo(
        path=f"/proc/{os.getpid()}/fd/{descriptor}",
        proof=proof,
        slot_bytes=layout.record_bytes,
        num_slots=num_slots,
        num_outgoing=num_slots // 2,
        layout=layout,
    )
    return Exchange(info, mmap.mmap(descriptor, 0))


def open_exchange(info: ExchangeInfo) -> Exchange:
    """Open what another process of this machine made.

    Raises:
        ExchangeError: it is not here, not ours to open, or not what it should be.
    """
    size = _PAGE + info.num_slots * info.slot_bytes
    try:
        descriptor = os.open(info.path, os.O_RDWR | os.O_CLOEXEC)
    except OSError as error:
        raise ExchangeError(f"the exchange of another process cannot be opened: {error.strerror}") from error
    try:
        if os.fstat(descriptor).st_size != size or os.pread(descriptor, PROOF_BYTES, 0) != info.proof:
            raise ExchangeError("what lies at the exchange's path is something else")
        return Exchange(info, mmap.mmap(descriptor, size))
    finally:
        os.close(descriptor)
