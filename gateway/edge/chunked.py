"""Decodes a chunked request body, strictly and within limits."""

from __future__ import annotations

_MAX_LINE_BYTES = 1024
_MAX_TRAILER_BYTES = 8 * 1024
_HEX_DIGITS = frozenset(b"0123456789abcdefABCDEF")


class BadChunkError(ValueError):
    """The chunked framing is malformed."""


class BodyTooLargeError(ValueError):
    """The body passed its limit."""


class ChunkedDecoder:
    """Takes pieces until the last chunk and its trailers have come; extensions and trailers are dropped."""

    __slots__ = (
        "_buffer",
        "_is_in_trailers",
        "_max_bytes",
        "_missing",
        "_pieces",
        "_trailer_bytes",
        "num_bytes",
    )

    def __init__(self, max_bytes: int) -> None:
        self._max_bytes = max_bytes
        self._buffer = b""
        self._pieces: list[bytes] = []
        self._missing = -1  # bytes still to come of the open chunk, -1 between chunks
        self._is_in_trailers = False
        self._trailer_bytes = 0
        self.num_bytes = 0

    @property
    def body(self) -> bytes:
        """What was decoded so far."""
        return b"".join(self._pieces)

    def feed(self, data: bytes) -> bytes | None:
        """Take a piece; return the bytes that follow the body once it is complete, else None.

        Raises:
            BadChunkError: malformed framing.
            BodyTooLargeError: the decoded body passed the limit.
        """
        data = self._buffer + data
        position = 0
        while True:
            if self._missing >= 0:
                taken = self._take_chunk(data, position)
                if taken < 0:
                    return None
                position = taken
                continue
            end = data.find(b"\r\n", position)
            if (len(data) if end < 0 else end) - position > _MAX_LINE_BYTES:
                raise BadChunkError("a line of the chunked framing is too long")
            if end < 0:
                self._buffer = data[position:]
                return None
            line = data[position:end]
            position = end + 2
            if not self._is_in_trailers:
                self._open_chunk(line)
            elif not line:
                return data[position:]
            else:
                self._count_trailer(line)

    def _take_chunk(self, data: bytes, position: int) -> int:
        """Take what there is of the open chunk; return the position after its end, or -1 to wait for more."""
        piece = data[position : position + self._missing]
        position += len(piece)
        if piece:
            self._pieces.append(piece)
            self._missing -= len(piece)
        ending = data[position : position + 2]
        if self._missing or len(ending) < 2:
            if ending == b"\r" or not ending:
                self._buffer = ending
                return -1
            raise BadChunkError("a chunk is not followed by a line break")
        if ending != b"\r\n":
            raise BadChunkError("a chunk is not followed by a line break")
        self._missing = -1
        return position + 2

    def _open_chunk(self, line: bytes) -> None:
        digits = line.partition(b";")[0].rstrip(b" \t")
        if not digits or len(digits) > 16 or not _HEX_DIGITS.issuperset(digits):
            raise BadChunkError("a chunk's size is not a hexadecimal number")
        size = int(digits, 16)
        self.num_bytes += size
        if self.num_bytes > self._max_bytes:
            raise BodyTooLargeError(f"the body is larger than {self._max_bytes} bytes")
        if size:
            self._missing = size
        else:
            self._is_in_trailers = True

    def _count_trailer(self, line: bytes) -> None:
        self._trailer_bytes += len(line)
        if self._trailer_bytes > _MAX_TRAILER_BYTES:
            raise BadChunkError("the trailers are too long")
