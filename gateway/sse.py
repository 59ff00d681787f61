"""Relays a replica's server-sent events to a client without touching what it need not touch.

Ordinary frames are forwarded verbatim; the frames that end a stream (usage, ``[DONE]``, errors) are held back
for the pipeline, which must first make the usage record durable. A frame is decoded only when it holds one of
the words that make it suspicious, so a token costs a few substring searches and no object of its own.
"""

from __future__ import annotations

import re
from collections.abc import Callable

import msgspec

_SEPARATOR = re.compile(rb"\r?\n\r?\n")
_USAGE = re.compile(rb'"usage"(?!: ?null)')
_DONE = b"[DONE]"
_NULL = msgspec.Raw(b"null")


class BrokenStreamError(ValueError):
    """The stream is not server-sent events of chat chunks; give up on the replica."""


class FrameTooLongError(BrokenStreamError):
    """A frame without an end grew past ``max_frame_bytes``."""


class _Frame(msgspec.Struct):
    """The fields that decide what a frame is; the rest is skipped without making objects of it."""

    choices: list[msgspec.Raw] | None = None
    usage: msgspec.Raw = _NULL
    error: msgspec.Raw = _NULL
    object: str | None = None


_decoder = msgspec.json.Decoder(_Frame)


class StreamRelay:
    """Cuts a byte stream into frames and forwards them to ``write``, joined as they arrived.

    ``write`` may be replaced between two pieces. Attributes to read at any time:

    - ``usage``: raw JSON of the final usage object (on a frame without choices), or None.
    - ``final_frame``: raw JSON of that whole frame, or None.
    - ``running_usage``: raw JSON of the last usage on a frame with choices (which was forwarded), or None.
    - ``is_done``: ``[DONE]`` was seen; nothing after it counts.
    - ``error``: raw JSON of an error frame's ``error``, or None; nothing after it counts.
    - ``num_frames``: frames with data that were forwarded.
    - ``first_frame_at``: ``clock()`` when the first of them was forwarded, or None.
    """

    __slots__ = (
        "_clock",
        "_max_frame_bytes",
        "_tail",
        "error",
        "final_frame",
        "first_frame_at",
        "is_done",
        "num_frames",
        "running_usage",
        "usage",
        "write",
    )

    def __init__(
        self,
        write: Callable[[bytes], None],
        *,
        clock: Callable[[], float],
        max_frame_bytes: int = 1 << 20,
    ) -> None:
        self.write = write
        self._clock = clock
        self._max_frame_bytes = max_frame_bytes
        self._tail = b""
        self.usage: bytes | None = None
        self.final_frame: bytes | None = None
        self.running_usage: bytes | None = None
        self.error: bytes | None = None
        self.is_done = False
        self.num_frames = 0
        self.first_frame_at: float | None = None

    @property
    def is_between_frames(self) -> bool:
        """False when the stream's last frame has no end yet."""
        return not self._tail.strip(b"\r\n")

    def feed(self, data: bytes) -> None:
        """Take the next piece of the stream.

        Raises:
            FrameTooLongError: a frame passed ``max_frame_bytes``.
            BrokenStreamError: a frame that should end the stream cannot be decoded.
        """
        if self.is_done or self.error is not None:
            return
        if self._tail:
            data = self._tail + data
            self._tail = b""
        if not data.endswith(b"\n\n"):
            end = data.rfind(b"\n\n") + 2 if data.find(b"\r") < 0 else _last_end(data)
            if end <= 1:
                self._keep(data)
                return
            self._keep(data[end:])
            data = data[:end]
        num_frames = 0 if _has_end(data) else _count_frames(data)
        if num_frames:
            self._forward(data, num_frames)
        else:
            self._sort_frames(data)

    def _keep(self, tail: bytes) -> None:
        if len(tail) > self._max_frame_bytes:
            raise FrameTooLongError(f"a frame is longer than {self._max_frame_bytes} bytes")
        self._tail = tail

    def _forward(self, data: bytes, num_frames: int) -> None:
        if num_frames:
            self.num_frames += num_frames
            if self.first_frame_at is None:
                self.first_frame_at = self._clock()
        self.write(data)

    def _sort_frames(self, block: bytes) -> None:
        """Look at each frame of a block that holds something suspicious."""
        end = _plain_prefix_end(block)
        plain = block[:end]
        num_plain = _count_frames(plain)
        if num_plain:
            self._forward(plain, num_plain)
            block = block[end:]
        kept: list[bytes] = []
        num_frames = 0
        start = 0
        for match in _SEPARATOR.finditer(block):
            frame = block[start : match.end()]
            event, payload = _parse_lines(block[start : match.start()])
            start = match.end()
            if payload is None:  # a comment, a retry time, an empty line
                kept.append(frame)
            elif self._is_held_back(event, payload):
                if self.is_done or self.error is not None:
                    self._tail = b""
                    break
            else:
                kept.append(frame)
                num_frames += 1
        else:
            self._tail = block[start:] + self._tail  # an extra line break belongs to the next frame
        if kept:
            self._forward(b"".join(kept), num_frames)

    def _is_held_back(self, event: bytes, payload: bytes) -> bool:
        if payload == _DONE:
            self.is_done = True
            return True
        if event == b"error":
            self.error = _error_of(payload)
            return True
        if not _is_suspicious(payload):
            return False
        try:
            frame = _decoder.decode(payload)
        except msgspec.DecodeError as error:
            raise BrokenStreamError(f"a frame cannot be decoded: {error}") from error
        if _is_value(frame.error):
            self.error = bytes(frame.error)
            return True
        if frame.object == "error":
            self.error = payload
            return True
        if not _is_value(frame.usage):
            return False
        if frame.choices:
            self.running_usage = bytes(frame.usage)
            return False
        self.usage = bytes(frame.usage)
        self.final_frame = payload
        return True


def _has_end(block: bytes) -> bool:
    """Whether any word is in it that may belong to the end of a stream.

    ``rfind`` is used where ``in`` would read better: what is looked for stands at the end, if anywhere. Every
    search of a block that came as a burst costs as much as a dozen calls.
    """
    return (
        block.rfind(_DONE) >= 0
        or block.rfind(b'"error"') >= 0
        or (block.rfind(b'"usage"') >= 0 and _USAGE.search(block) is not None)
    )


def _count_frames(block: bytes) -> int:
    """Count the frames of a block that ends with one; 0 when they are not all of one line of data."""
    if not block.startswith(b"data:") or block.find(b"\r") >= 0:
        return 0
    num_lines = block.count(b"\n")
    if num_lines == 2:
        return 1
    num_frames = block.count(b"\n\ndata:") + 1
    return num_frames if num_lines == 2 * num_frames else 0


def _plain_prefix_end(block: bytes) -> int:
    """Position after the last frame that ends before the first suspicious word, or 0."""
    at = block.find(b'"usage"')
    usage = None if at < 0 else _USAGE.search(block, at)  # the expression is slower to find where it begins
    words = [block.find(b'"error"'), block.find(_DONE), -1 if usage is None else usage.start()]
    first = min((at for at in words if at >= 0), default=0)
    end = block.rfind(b"\n\n", 0, first) + 2
    return end if end > 1 else 0


def _is_suspicious(payload: bytes) -> bool:
    return payload.find(b'"error"') >= 0 or _USAGE.search(payload) is not None


def _is_value(raw: msgspec.Raw) -> bool:
    return bytes(raw) != b"null"


def _last_end(data: bytes) -> int:
    """Position after the last separator, or 0."""
    end = 0
    for match in _SEPARATOR.finditer(data):
        end = match.end()
    return end


def _parse_lines(frame: bytes) -> tuple[bytes, bytes | None]:
    """Split a frame into its event name and its data; the data is None when it has no data line."""
    event = b""
    payload: bytes | None = None
    for line in frame.split(b"\n"):
        name, _, value = line.rstrip(b"\r").partition(b":")
        value = value.removeprefix(b" ")
        if name == b"data":
            payload = value if payload is None else payload + b"\n" + value
        elif name == b"event":
            event = value
    return event, payload


def _error_of(payload: bytes) -> bytes:
    """The ``error`` value of an error event, or the whole payload where it has none."""
    try:
        frame = _decoder.decode(payload)
    except msgspec.DecodeError:
        return payload
    return bytes(frame.error) if _is_value(frame.error) else payload
