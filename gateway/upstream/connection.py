"""One keep-alive connection to a replica: a request at a time, its answer parsed by llhttp."""

from __future__ import annotations

import asyncio
import math
from typing import Protocol, cast

import httptools

from gateway.config import UpstreamConfig
from gateway.upstream.answer import Answer
from gateway.upstream.errors import (
    ReplicaError,
    ReplicaLostError,
    ReplicaTimeoutError,
    ReplicaUnreachableError,
)

_BODILESS = frozenset((204, 304))


class ConnectionOwner(Protocol):
    """The pool, as far as a connection needs it."""

    def release(self, connection: ReplicaConnection) -> None:
        """The answer is complete and the connection can serve another request."""

    def forget(self, connection: ReplicaConnection) -> None:
        """The connection is gone."""


class ReplicaConnection(asyncio.Protocol):
    """The protocol of a connection to one replica. ``deadline`` is watched by the client's sweep."""

    __slots__ = (
        "_answer",
        "_config",
        "_has_bytes",
        "_headers",
        "_idle_timeout_s",
        "_is_complete",
        "_is_interim",
        "_is_paused",
        "_is_reusable",
        "_loop",
        "_now",
        "_num_pieces",
        "_owner",
        "_parser",
        "_phase",
        "_pieces",
        "_replica_id",
        "_timeout_s",
        "_total_deadline",
        "_total_timeout_s",
        "_transport",
        "deadline",
        "num_requests",
        "on_body",
    )

    def __init__(
        self,
        owner: ConnectionOwner,
        replica_id: str,
        config: UpstreamConfig,
        loop: asyncio.AbstractEventLoop,
    ) -> None:
        self._owner = owner
        self._replica_id = replica_id
        self._config = config
        self._loop = loop
        self._now = loop.time
        self._answer: Answer | None = None
        self._pieces: list[bytes] = []
        self.on_body = self._pieces.append  # the parser calls it once per chunk: no Python frame for that
        self._headers: dict[str, str] = {}
        self._parser = httptools.HttpResponseParser(self)
        self._num_pieces = 0
        self._has_bytes = False
        self._is_complete = False
        self._is_interim = False
        self._is_paused = False
        self._is_reusable = True
        self._phase = ""
        self._timeout_s = self._idle_timeout_s = self._total_timeout_s = math.inf
        self._total_deadline = math.inf
        self.deadline = math.inf
        self.num_requests = 0

    @property
    def is_usable(self) -> bool:
        """True while another request can be sent."""
        return self._is_reusable and not self._transport.is_closing()

    def send(
        self, head: bytes, body: bytes, timeout_s: float | None, first_byte_timeout_s: float | None
    ) -> Answer:
        """Send a request; its answer's head comes through :attr:`~gateway.upstream.answer.Answer.head`."""
        config = self._config
        now = self._now()
        total_s = config.request_timeout_s if timeout_s is None else timeout_s
        first_byte_s = config.first_byte_timeout_s if first_byte_timeout_s is None else first_byte_timeout_s
        self._timeout_s = min(first_byte_s, total_s)
        self._idle_timeout_s = min(config.idle_timeout_s, total_s)
        self._total_timeout_s = total_s
        self._total_deadline = now + total_s
        self.deadline = now + self._timeout_s
        self._phase = "first_byte"
        self._has_bytes = self._is_complete = False
        self._headers = {}
        self.num_requests += 1
        answer = self._answer = Answer(self, self._replica_id, config.max_response_bytes, self._loop)
        if len(body) > 64 * 1024:
            self._transport.writelines((head, body))
        else:
            self._transport.write(head + body)
        return answer

    # --- the transport's side --------------------------------------------------------------------

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = cast(asyncio.Transport, transport)

    def data_received(self, data: bytes) -> None:
        answer = self._answer
        if answer is None:  # nothing was asked: whatever it is, this connection cannot be trusted any more
            self.close()
            return
        self._has_bytes = True
        self._phase = "idle"
        self.deadline = self._now() + self._idle_timeout_s
        try:
            self._parser.feed_data(data)
        except (httptools.HttpParserError, httptools.HttpParserUpgrade) as error:
            self._fail(ReplicaLostError(self._replica_id, f"malformed answer: {error}"))
            return
        pieces = self._pieces
        if self._is_complete:
            del pieces[self._num_pieces :]  # bytes behind the end are nobody's
        if pieces and self._answer is answer:
            piece = pieces[0] if len(pieces) == 1 else b"".join(pieces)
            pieces.clear()
            answer.size += len(piece)
            if answer.size > answer.limit:
                answer.refuse_size()
            elif (consumer := answer.consumer) is None:
                answer.pieces.append(piece)
            else:
                try:
                    consumer(piece)
                except (ValueError, ReplicaError) as error:  # what a consumer may say about bad bytes
                    answer.give_up(error)
        if self._is_complete and self._answer is answer:
            self._finish(answer)

    def connection_lost(self, exc: Exception | None) -> None:
        self._is_reusable = False
        if self._answer is not None:
            reason = f": {exc}" if exc is not None else ""
            if self._has_bytes:
                self._fail(ReplicaLostError(self._replica_id, f"the answer broke off{reason}"))
            else:
                message = f"the connection closed before an answer{reason}"
                self._fail(ReplicaUnreachableError(self._replica_id, message))
        self._owner.forget(self)

    # --- the parser's side (``on_body`` is an attribute) -----------------------------------------

    def on_message_begin(self) -> None:
        if self._is_complete or self._answer is None:
            self._is_reusable = False  # bytes after the end of the answer

    def on_header(self, name: bytes, value: bytes) -> None:
        key = name.decode("latin-1").lower()
        text = value.decode("latin-1").strip(" \t")
        headers = self._headers
        headers[key] = f"{headers[key]}, {text}" if key in headers else text

    def on_headers_complete(self) -> None:
        if self._is_complete:
            return
        status = self._parser.get_status_code()
        headers = self._headers
        if status < 200:
            self._is_interim = True
            self._headers = {}
            return
        answer = self._answer
        if answer is None:
            return
        self._is_reusable = self._is_reusable and self._parser.should_keep_alive()
        is_framed = "content-length" in headers or "transfer-encoding" in headers or status in _BODILESS
        if is_framed:
            answer.head_received(status, headers)
        else:  # its end could not be told from a broken connection
            self._fail(ReplicaLostError(self._replica_id, "the answer's body has no length"))

    def on_message_complete(self) -> None:
        if self._is_interim:
            self._is_interim = False
        else:
            if not self._is_complete:
                self._num_pieces = len(self._pieces)
            self._is_complete = True

    # --- the answer's side -----------------------------------------------------------------------

    def pause_reading(self) -> None:
        if not self._is_paused and not self._is_complete:
            self._is_paused = True
            self.deadline = math.inf
            self._transport.pause_reading()

    def resume_reading(self) -> None:
        if self._is_paused:
            self._is_paused = False
            self.deadline = self._now() + self._idle_timeout_s
            if not self._transport.is_closing():
                self._transport.resume_reading()

    def close(self) -> None:
        """Close at once; the replica sees its client go."""
        self._is_reusable = False
        self._answer = None
        self._transport.abort()

    def lose(self, reason: str) -> None:
        """Close; a request in flight fails with ``reason``."""
        self._fail(ReplicaLostError(self._replica_id, reason))

    def sweep(self, now: float) -> None:
        """Fail the request whose deadline passed (called by the client)."""
        if self._answer is None:
            return
        if now >= self._total_deadline:
            self._fail(ReplicaTimeoutError(self._replica_id, "total", self._total_timeout_s))
        elif now >= self.deadline:
            timeout_s = self._timeout_s if self._phase == "first_byte" else self._idle_timeout_s
            self._fail(ReplicaTimeoutError(self._replica_id, self._phase, timeout_s))

    def _finish(self, answer: Answer) -> None:
        self._answer = None
        if self._is_paused:
            self.resume_reading()
        self.deadline = self._now() + self._config.keepalive_timeout_s
        if self.is_usable:
            self._owner.release(self)
        else:
            self._transport.abort()
        answer.completed()

    def _fail(self, error: ReplicaError) -> None:
        answer = self._answer
        self.close()
        if answer is not None:
            answer.failed(error)
