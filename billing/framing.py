"""How groups of bytes lie in a segment file, and how damage is told from an unfinished write.

A segment is a header and then frames, back to back; a frame is (marker, count, length, checksum) and a
payload. What follows the last frame is zeros that were reserved ahead, or nothing. The marker holds bytes
that no UTF-8 text contains, so nothing that a client sends can pass for a frame.

Appends are flushed one at a time. Hence at most the very last frame of the newest segment can be unfinished
after a crash: it was never acknowledged and is dropped. A bad frame with a sound one behind it is damage.
"""

from __future__ import annotations

import zlib
from collections.abc import Iterator
from struct import Struct

import msgspec

SEGMENT_HEADER = b"\xff\xfeEMBERGATE-SPOOL1"
FRAME_MARKER = b"\xff\xfeEG"

_FRAME = Struct("<4sIII")
_COVERED = Struct("<II")

FRAME_HEADER_BYTES = _FRAME.size


class Frame(msgspec.Struct, frozen=True):
    """A sound frame: ``num_records`` in the payload at ``[start, end)`` of the segment."""

    num_records: int
    start: int
    end: int


def frame(payload: bytes, num_records: int) -> bytes:
    """The bytes to append for ``payload``."""
    length = len(payload)
    return _FRAME.pack(FRAME_MARKER, num_records, length, _checksum(num_records, length, payload)) + payload


def frame_at(data: bytes, position: int) -> Frame | None:
    """The sound frame whose header stands at ``position``, if there is one."""
    start = position + FRAME_HEADER_BYTES
    if start > len(data):
        return None
    marker, num_records, length, checksum = _FRAME.unpack_from(data, position)
    end = start + length
    if marker != FRAME_MARKER or end > len(data):
        return None
    if checksum != _checksum(num_records, length, data[start:end]):
        return None
    return Frame(num_records, start, end)


def frames_from(data: bytes, position: int) -> Iterator[Frame]:
    """The sound frames one behind the other from ``position`` on, until the first thing that is none."""
    found = frame_at(data, position)
    while found is not None:
        yield found
        found = frame_at(data, found.end)


def has_frame_after(data: bytes, position: int) -> bool:
    """Whether a sound frame stands anywhere behind ``position``."""
    candidate = data.find(FRAME_MARKER, position + 1)
    while candidate >= 0:
        if frame_at(data, candidate) is not None:
            return True
        candidate = data.find(FRAME_MARKER, candidate + 1)
    return False


def is_blank(data: bytes, position: int) -> bool:
    """Whether only zeros, or nothing, follow ``position``."""
    return data.count(0, position) == len(data) - position


def _checksum(num_records: int, length: int, payload: bytes) -> int:
    return zlib.crc32(payload, zlib.crc32(_COVERED.pack(num_records, length)))
