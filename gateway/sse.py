"""Relays a replica's server-sent events to a client without touching what it need not touch.

Ordinary frames are forwarded verbatim, in the pieces they arrive in; the frames that end a stream (usage, ``[DONE]``,
errors) are held back for the pipeline, which must first make the usage record durable.
"""

from __future__ import annotations

from collections.abc import Callable


class FrameTooLongError(ValueError):
    """A frame without an end grew past ``max_frame_bytes``."""


class StreamRelay:
    """Cuts a byte stream into frames and forwards them to ``write``.

    Attributes (read after the stream ended, or at any time):

    - ``usage``: raw JSON of the final usage object (frame with empty ``choices``), or None.
    - ``final_frame``: raw JSON of that whole frame, or None.
    - ``running_usage``: raw JSON of the last usage that came on a frame with choices (forwarded), or None.
    - ``is_done``: ``[DONE]`` was seen. ``error``: raw JSON of an error frame's ``error`` value, or None.
    - ``finish_seen``: unused by the relay's fast path; see ``is_done``.
    - ``num_frames``: forwarded frames. ``first_frame_at``: ``clock()`` at the first forwarded frame, or None.
    """

    def __init__(
        self,
        write: Callable[[bytes], None],
        *,
        clock: Callable[[], float],
        max_frame_bytes: int = 1 << 20,
    ) -> None:
        self._write = write
        self._clock = clock
        self._max_frame_bytes = max_frame_bytes
        self.usage: bytes | None = None
        self.final_frame: bytes | None = None
        self.running_usage: bytes | None = None
        self.error: bytes | None = None
        self.is_done = False
        self.num_frames = 0
        self.first_frame_at: float | None = None

    def feed(self, data: bytes) -> None:
        """Take the next piece of the stream.

        Raises:
            FrameTooLongError: a frame passed ``max_frame_bytes``; give up on the replica.
        """
