"""How the answer to one request is written, where that differs from forwarding what a replica says."""

from __future__ import annotations

from typing import Protocol


class AnswerForm(Protocol):
    """Turns a replica's chat completion into another form; belongs to one request and may keep state.

    In a stream :meth:`forward` gets every block of chunks once, in order, then either :meth:`stream_end` or
    :meth:`failure` is called. Nothing is forwarded twice: a stream that began is never tried again.
    """

    def completion(self, completion: bytes, usage: bytes) -> bytes:
        """The body of an answer in one piece."""

    def forward(self, block: bytes) -> bytes:
        """What the client gets for whole ``chat.completion.chunk`` frames; may be empty."""

    def stream_end(self, final_chunk: bytes, usage: bytes, *, includes_usage: bool) -> bytes:
        """What follows when the answer is complete and recorded."""

    def failure(self, code: str, message: str) -> bytes:
        """The event that ends a stream which cannot be completed."""
