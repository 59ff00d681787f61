"""A replica's answer: head first, then the body by :meth:`ReplicaResponse.read` or
:meth:`ReplicaResponse.relay`.
"""

from __future__ import annotations

from asyncio import Future
from collections.abc import Callable, Mapping
from typing import Protocol


class ReplicaResponse(Protocol):
    """An answer whose head has come. Use exactly one of :meth:`read` and :meth:`relay`, or :meth:`abort`."""

    @property
    def status(self) -> int:
        """HTTP status."""

    @property
    def headers(self) -> Mapping[str, str]:
        """Response headers, names in lower case."""

    async def read(self, limit: int | None = None) -> bytes:
        """Return the whole body.

        Args:
            limit: most bytes to accept; ``max_response_bytes`` of the configuration when None.

        Raises:
            ReplicaLostError: it broke off, or passed the limit.
            ReplicaTimeoutError: idle or total deadline.
        """

    def relay(self, consumer: Callable[[bytes], None]) -> Future[None]:
        """Give every piece of the body to ``consumer`` as it arrives, without a coroutine switch.

        The future ends when the body ended cleanly, and fails like :meth:`read`. Cancelling it aborts. An
        exception out of ``consumer`` aborts the answer and fails the future with it.
        """

    def pause_reading(self) -> None:
        """Stop taking bytes from the replica (the client is slow); the idle deadline rests meanwhile."""

    def resume_reading(self) -> None:
        """Undo :meth:`pause_reading`."""

    def abort(self) -> None:
        """Close the connection now, which frees the sequence on the replica. Idempotent; harmless after the
        end.
        """
