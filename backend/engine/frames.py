"""Length-prefixed msgpack frames over a stream socket.

A frame is a 4-byte little-endian length and that many bytes of msgpack. A length over ``MAX_FRAME_BYTES`` is
an error, not an allocation.
"""

from __future__ import annotations

import struct

import msgspec

MAX_FRAME_BYTES = 64 * 1024 * 1024
_HEADER = struct.Struct("<I")
_encoder = msgspec.msgpack.Encoder()


class FrameError(Exception):
    """The other end sent a frame that is too long; the stream cannot be read any further."""


def encode_frame(message: object) -> bytes:
    """Encode one message with its length in front.

    Raises:
        FrameError: when it is longer than a frame may be.
    """
    frame = bytearray(_HEADER.size)
    _encoder.encode_into(message, frame, _HEADER.size)
    length = len(frame) - _HEADER.size
    if length > MAX_FRAME_BYTES:
        raise FrameError(f"a frame of {length} bytes is longer than {MAX_FRAME_BYTES}")
    _HEADER.pack_into(frame, 0, length)
    return bytes(frame)


class FrameBuffer:
    """Cuts a byte stream into frames; holds at most one unfinished frame and one read."""

    def __init__(self) -> None:
        self._pending = bytearray()

    def feed(self, data: bytes | memoryview) -> list[bytes]:
        """Add received bytes; returns the payload of each frame that is now complete.

        Raises:
            FrameError: when a length is beyond the limit.
        """
        pending = self._pending
        pending += data
        payloads: list[bytes] = []
        start = 0
        while len(pending) - start >= _HEADER.size:
            (length,) = _HEADER.unpack_from(pending, start)
            if length > MAX_FRAME_BYTES:
                raise FrameError(f"a frame of {length} bytes is longer than {MAX_FRAME_BYTES}")
            end = start + _HEADER.size + length
            if len(pending) < end:
                break
            payloads.append(bytes(pending[start + _HEADER.size : end]))
            start = end
        del pending[:start]
        return payloads
