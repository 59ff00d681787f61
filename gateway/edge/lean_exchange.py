"""The exchange of the lean protocol: an answer costs one write, a stream's piece one more."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Protocol

from gateway.edge.exchange import Headers, ResponseStateError
from gateway.edge.head import RequestHead, response_head

_NEW, _STREAMING, _ENDED = range(3)


class AnswerSink(Protocol):
    """The connection, as far as an exchange needs it."""

    @property
    def is_writable(self) -> bool:
        """False while the write buffer is over its limit."""

    def date_line(self) -> str:
        """The ``date`` header line of this second."""

    def wants_keep_alive(self) -> bool:
        """False when the server is stopping."""

    @property
    def send(self) -> Callable[[bytes], None]:
        """Send bytes to the client. Each call may be a system call of its own: give it what belongs
        together.
        """

    def call_soon(self, callback: Callable[[], None]) -> None:
        """Run ``callback`` after what is going on now."""

    def exchange_ended(self, keep_alive: bool) -> None:
        """The answer is complete: take the next request, or close after what was queued has left."""

    def exchange_aborted(self, is_visible: bool) -> None:
        """Close; ``is_visible`` when the framing already shows that the answer is cut (else reset)."""


class LeanExchange:
    """See :class:`gateway.edge.exchange.Exchange`."""

    __slots__ = (
        "_connection",
        "_head",
        "_is_chunked",
        "_keep_alive",
        "_on_disconnect",
        "_on_writable",
        "_pending",
        "_send",
        "_state",
        "body",
        "headers",
        "is_disconnected",
        "method",
        "path",
        "peer",
        "query",
    )

    def __init__(self, connection: AnswerSink, head: RequestHead, body: bytes, peer: str) -> None:
        self._connection = connection
        self._head = head
        self._send = connection.send
        self._pending = b""  # the head, until the first piece
        self._state = _NEW
        self._is_chunked = False
        self._keep_alive = False
        self._on_disconnect: Callable[[], None] | None = None
        self._on_writable: Callable[[bool], None] | None = None
        self.method = head.method
        self.path = head.path
        self.query = head.query
        self.headers: Mapping[str, str] = head.headers
        self.body = body
        self.peer = peer
        self.is_disconnected = False

    @property
    def is_started(self) -> bool:
        return self._state != _NEW

    @property
    def is_writable(self) -> bool:
        return self._connection.is_writable

    def on_disconnect(self, callback: Callable[[], None] | None) -> None:
        self._on_disconnect = callback
        if callback is not None and self.is_disconnected:
            self._on_disconnect = None
            callback()

    def on_writable(self, callback: Callable[[bool], None] | None) -> None:
        self._on_writable = callback

    def respond(self, status: int, headers: Headers, body: bytes) -> None:
        if self._state != _NEW:
            raise ResponseStateError("the answer was already started")
        framing = self._framing(f"content-length: {len(body)}\r\n", can_keep_alive=True)
        head = response_head(status, headers, framing)
        self._state = _ENDED
        if not self.is_disconnected:
            self._send(head + body)
            self._end()

    def start_stream(self, status: int, headers: Headers) -> None:
        if self._state != _NEW:
            raise ResponseStateError("the answer was already started")
        self._is_chunked = not self._head.is_http_1_0
        length = "transfer-encoding: chunked\r\n" if self._is_chunked else ""
        head = response_head(status, headers, self._framing(length, can_keep_alive=self._is_chunked))
        self._state = _STREAMING
        if not self.is_disconnected:
            self._pending = head
            self._connection.call_soon(self._flush_head)

    def write(self, data: bytes) -> None:
        if self._state != _STREAMING or self.is_disconnected or not data:
            self._check_streaming()
            return
        if self._is_chunked:
            data = b"%x\r\n%b\r\n" % (len(data), data)
        if self._pending:
            data = self._pending + data
            self._pending = b""
        self._send(data)

    def finish(self, data: bytes = b"") -> None:
        self._check_streaming()
        if self.is_disconnected:
            self._state = _ENDED
            return
        end = b"0\r\n\r\n" if self._is_chunked else b""
        if data and self._is_chunked:
            data = b"%x\r\n%b\r\n" % (len(data), data)
        last = self._pending + data + end
        self._pending = b""
        if last:
            self._send(last)
        self._state = _ENDED
        self._end()

    def abort(self) -> None:
        if self._state == _ENDED or self.is_disconnected:
            return
        is_visible = self._state == _NEW or self._is_chunked
        self._flush_head()
        self._state = _ENDED
        self._forget()
        self._connection.exchange_aborted(is_visible)

    def client_gone(self) -> None:
        """The connection ended before the answer did (called by the connection)."""
        self.is_disconnected = True
        callback = self._on_disconnect
        self._forget()
        if callback is not None and self._state != _ENDED:
            callback()

    def writability_changed(self, is_writable: bool) -> None:
        """The write buffer filled or drained (called by the connection)."""
        if self._on_writable is not None:
            self._on_writable(is_writable)

    def handler_returned(self) -> None:
        """The handler is over; it must have ended the answer (called by the connection)."""
        if self._state == _NEW:
            self.respond(500, (("content-type", "text/plain"),), b"internal error\n")
        elif self._state == _STREAMING:
            self.abort()

    def _check_streaming(self) -> None:
        if self._state != _STREAMING and not self.is_disconnected:
            raise ResponseStateError("the answer is not a stream that goes on")

    def _flush_head(self) -> None:
        """Send the head by itself when no piece came in the same moment."""
        if self._pending and not self.is_disconnected:
            self._send(self._pending)
            self._pending = b""

    def _framing(self, length: str, *, can_keep_alive: bool) -> str:
        self._keep_alive = can_keep_alive and self._head.keep_alive and self._connection.wants_keep_alive()
        if not self._keep_alive:
            length += "connection: close\r\n"
        elif self._head.is_http_1_0:
            length += "connection: keep-alive\r\n"
        return length + self._connection.date_line()

    def _end(self) -> None:
        self._forget()
        self._connection.exchange_ended(self._keep_alive)

    def _forget(self) -> None:
        self._on_disconnect = None
        self._on_writable = None
