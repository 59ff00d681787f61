"""What a connection to a replica fills and a request's handler empties."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Mapping
from typing import Protocol

from gateway.upstream.errors import (
    ReplicaAbortedError,
    ReplicaAnswerTooLargeError,
    ReplicaError,
)


class AnswerSource(Protocol):
    """The connection, as far as an answer needs it."""

    def pause_reading(self) -> None: ...

    def resume_reading(self) -> None: ...

    def close(self) -> None: ...


class Answer:
    """See :class:`gateway.upstream.response.ReplicaResponse`. ``head`` is done when status and headers are
    there.
    """

    __slots__ = (
        "_end",
        "_error",
        "_is_complete",
        "_is_open",
        "_loop",
        "_replica_id",
        "_source",
        "consumer",
        "head",
        "headers",
        "limit",
        "pieces",
        "size",
        "status",
    )

    def __init__(
        self, source: AnswerSource, replica_id: str, limit: int, loop: asyncio.AbstractEventLoop
    ) -> None:
        self._source = source
        self._loop = loop
        self._replica_id = replica_id
        self.limit = limit
        self.pieces: list[bytes] = []
        self.size = 0
        self.consumer: Callable[[bytes], object] | None = None
        self._end: asyncio.Future[None] | None = None
        self._error: BaseException | None = None
        self._is_complete = False
        self._is_open = True  # the connection still works for this answer
        self.head: asyncio.Future[None] = loop.create_future()
        self.status = 0
        self.headers: Mapping[str, str] = {}

    # --- the handler's side ----------------------------------------------------------------------

    async def read(self, limit: int | None = None) -> bytes:
        if limit is not None:
            self.limit = min(limit, self.limit)
        if self.size > self.limit:
            self.refuse_size()
        if not self._is_complete or self._error is not None:
            try:
                await self._wait_end()
            except asyncio.CancelledError:
                self.abort()
                raise
        pieces = self.pieces
        return pieces[0] if len(pieces) == 1 else b"".join(pieces)

    def relay(self, consumer: Callable[[bytes], object]) -> asyncio.Future[None]:
        pieces, self.pieces = self.pieces, []
        if pieces:
            self._consume(consumer, b"".join(pieces))
        self.consumer = consumer
        end = self._wait_end()
        end.add_done_callback(self._relay_ended)
        return end

    def pause_reading(self) -> None:
        if self._is_open:
            self._source.pause_reading()

    def resume_reading(self) -> None:
        if self._is_open:
            self._source.resume_reading()

    def abort(self) -> None:
        self.give_up(ReplicaAbortedError(self._replica_id, "the request was given up"))

    # --- the connection's side -------------------------------------------------------------------

    def head_received(self, status: int, headers: Mapping[str, str]) -> None:
        self.status = status
        self.headers = headers
        if not self.head.done():
            self.head.set_result(None)

    def completed(self) -> None:
        self._is_open = False
        self._is_complete = True
        if self._end is not None and not self._end.done():
            self._end.set_result(None)

    def failed(self, error: BaseException) -> None:
        self._is_open = False
        if self._error is None:
            self._error = error
        if not self.head.done():
            self.head.set_exception(error)
        elif self._end is not None and not self._end.done():
            self._end.set_exception(error)

    def give_up(self, error: BaseException) -> None:
        """Close the connection and fail with ``error``, unless the answer is over."""
        if self._is_open:
            self._cut(error)

    def refuse_size(self) -> None:
        """The body passed its limit."""
        message = f"the answer is larger than {self.limit} bytes"
        self._cut(ReplicaAnswerTooLargeError(self._replica_id, message))

    # --- inside ----------------------------------------------------------------------------------

    def _wait_end(self) -> asyncio.Future[None]:
        """A future of the answer's end, already done when it has come."""
        end = self._end = self._loop.create_future()
        if self._error is not None:
            end.set_exception(self._error)
        elif self._is_complete:
            end.set_result(None)
        return end

    def _consume(self, consumer: Callable[[bytes], object], piece: bytes) -> None:
        try:
            consumer(piece)
        except (ValueError, ReplicaError) as error:  # what a consumer may say about bad bytes
            self._cut(error)

    def _cut(self, error: BaseException) -> None:
        """Fail even when the last byte has already come."""
        if self._is_open:
            self._source.close()
        self.failed(error)

    def _relay_ended(self, end: asyncio.Future[None]) -> None:
        self.consumer = None
        if end.cancelled():
            self.abort()
