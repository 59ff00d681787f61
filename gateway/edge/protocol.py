"""One client connection: reads requests, gives hot ones to a handler and the rest of the connection to
aiohttp.

Requests are served one at a time. While one is in flight the socket stays open for reading, because that is
how a client's going away shows; bytes of a next request are kept within a bound.
"""

from __future__ import annotations

import asyncio
import logging
import math
import socket
import struct
from collections.abc import Callable
from typing import cast

from gateway.config import GatewayConfig
from gateway.edge.admission import BodyBudget, EarlyCheck, is_checked_early
from gateway.edge.chunked import BadChunkError, BodyTooLargeError, ChunkedDecoder
from gateway.edge.exchange import Handler, Headers
from gateway.edge.head import (
    BadHeadError,
    RequestHead,
    parse_head,
    problem_of_beginning,
    response_head,
)
from gateway.edge.lean_exchange import LeanExchange

HotMatcher = Callable[[str], Handler | None]
"""Given the raw path of a POST, the handler to give it to, or None to leave it to aiohttp."""

Refusal = Callable[[str, int, str], tuple[Headers, bytes]]
"""Makes headers and body of an answer that the edge itself gives: (path or "", status, message)."""

_LOG = logging.getLogger(__name__)

_HEAD, _CHECKED, _BODY, _CHUNKED_BODY, _BUSY, _CLOSING, _HANDED_OVER = range(7)

_MIN_BODY_BYTES_PER_S = 8 * 1024
"""A slow body earns a second more for each of these, so that long uploads pass and trickles do not."""

LINGER_S = 2.0
"""How long a refused client may go on sending."""


class EdgeState:
    """What all connections of one server share."""

    def __init__(
        self,
        config: GatewayConfig,
        match: HotMatcher,
        refusal: Refusal,
        make_fallback: Callable[[], asyncio.Protocol],
        early_check: EarlyCheck | None,
        bodies: BodyBudget,
    ) -> None:
        self.config = config
        self.early_check = early_check
        self.bodies = bodies
        self.checks: set[asyncio.Task[None]] = set()
        self.match = match
        self.refusal = refusal
        self.make_fallback = make_fallback
        self.loop = asyncio.get_running_loop()
        self.connections: set[EdgeConnection] = set()
        self.stalled: set[EdgeConnection] = set()
        self.tasks: dict[LeanExchange, asyncio.Task[None]] = {}
        self.is_stopping = False
        self.all_closed = asyncio.Event()
        self.date_line = ""

    async def run(self, handler: Handler, exchange: LeanExchange) -> None:
        """A handler's task: sees to it that the exchange is answered, whatever the handler does."""
        try:
            await handler(exchange)
        except Exception:  # noqa: BLE001 - the last guard: nobody waits for this task
            _LOG.exception("handler of %s failed", exchange.path)
        finally:
            del self.tasks[exchange]
            exchange.handler_returned()


class EdgeConnection(asyncio.Protocol):
    """The protocol of an accepted socket. ``deadline`` is watched by the server's sweep."""

    __slots__ = (
        "_buffer",
        "_decoder",
        "_edge",
        "_exchange",
        "_fallback",
        "_handler",
        "_head",
        "_is_body_unread",
        "_is_reading_paused",
        "_missing",
        "_num_reserved",
        "_peer",
        "_phase",
        "_pieces",
        "_received_since",
        "_scanned",
        "_stalled_bytes",
        "_stalled_since",
        "_transport",
        "deadline",
        "is_writable",
        "send",
    )

    def __init__(self, edge: EdgeState) -> None:
        self._edge = edge
        self._phase = _HEAD
        self._buffer = b""
        self._scanned = 0
        self._exchange: LeanExchange | None = None
        self._fallback: asyncio.Protocol | None = None
        self._is_reading_paused = False
        self._is_body_unread = False
        self._num_reserved = 0
        self._peer = ""
        self._stalled_bytes = 0
        self._stalled_since = 0.0
        self.deadline = math.inf
        self.is_writable = True

    # --- the transport's side -------------------------------------------------------------------------------

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        edge = self._edge
        self._transport = cast(asyncio.Transport, transport)
        self.send: Callable[[bytes], None] = self._transport.write
        self._transport.set_write_buffer_limits(high=edge.config.write_buffer_bytes)
        peername = transport.get_extra_info("peername")
        if isinstance(peername, tuple):
            self._peer = str(peername[0])
        is_full = len(edge.connections) >= edge.config.max_connections
        edge.connections.add(self)
        self.deadline = edge.loop.time() + edge.config.read_timeout_s
        if is_full:
            self._refuse(503, "too many connections")

    def data_received(self, data: bytes) -> None:
        phase = self._phase
        if phase == _HEAD:
            if not self._buffer:
                self.deadline = self._edge.loop.time() + self._edge.config.read_timeout_s
                self._read_head(data, 0)
            else:
                self._read_head(self._buffer + data, self._scanned)
        elif phase == _HANDED_OVER:
            cast(asyncio.Protocol, self._fallback).data_received(data)
        elif phase == _BODY:
            self._read_body(data)
        elif phase == _CHUNKED_BODY:
            self._read_chunked_body(data)
        elif phase in (_BUSY, _CHECKED):
            self._keep_for_later(data)

    def eof_received(self) -> bool | None:
        if self._fallback is not None:
            return self._fallback.eof_received()
        self._client_gone()
        return False

    def connection_lost(self, exc: Exception | None) -> None:
        edge = self._edge
        edge.connections.discard(self)
        edge.stalled.discard(self)
        self._free_body()
        self.deadline = math.inf
        if self._fallback is not None:
            self._fallback.connection_lost(exc)
        self._phase = _CLOSING
        self._client_gone()
        if edge.is_stopping and not edge.connections:
            edge.all_closed.set()

    def pause_writing(self) -> None:
        self.is_writable = False
        self._stalled_bytes = 0
        self._edge.stalled.add(self)
        if self._fallback is not None:
            self._fallback.pause_writing()
        if self._exchange is not None:
            self._exchange.writability_changed(False)

    def resume_writing(self) -> None:
        self.is_writable = True
        self._edge.stalled.discard(self)
        if self._fallback is not None:
            self._fallback.resume_writing()
        if self._exchange is not None:
            self._exchange.writability_changed(True)

    # --- reading a request ----------------------------------------------------------------------------------

    def _read_head(self, data: bytes, scan_from: int) -> None:
        end = data.find(b"\r\n\r\n", scan_from)
        if end == 0 or data.startswith(b"\r\n"):  # stray line breaks between requests are allowed
            data = data.lstrip(b"\r\n")
            end = data.find(b"\r\n\r\n")
        max_bytes = self._edge.config.max_header_bytes
        if end > max_bytes or (end < 0 and len(data) > max_bytes):
            self._refuse(431, f"the request's head is larger than {max_bytes} bytes")
            return
        if end < 0:
            problem = problem_of_beginning(data)
            if problem:
                self._refuse(400, problem)
                return
            self._buffer = data
            self._scanned = max(len(data) - 3, 0)
            return
        size = end + 4
        try:
            head = parse_head(data[:size])
        except BadHeadError as error:
            self._refuse(error.status, str(error))
            return
        handler = self._edge.match(head.path) if head.method == "POST" else None
        if handler is None:
            self._hand_over(data)
            return
        self._head = head
        self._handler = handler
        body = data[size:]
        if head.content_length == len(body) <= self._edge.config.max_body_bytes:
            self._dispatch(body, b"")
        else:
            self._start_body(head, body)

    def _start_body(self, head: RequestHead, data: bytes) -> None:
        edge = self._edge
        max_bytes = edge.config.max_body_bytes
        if head.content_length > max_bytes:
            self._refuse(413, f"the body is larger than {max_bytes} bytes", head.path)
            return
        expectation = head.headers.get("expect", "100-continue")
        if expectation.lower() != "100-continue" and not head.is_http_1_0:
            self._refuse(417, f"expectation {expectation!r} is not supported", head.path)
            return
        self._buffer = b""
        self._received_since = edge.loop.time()
        if edge.early_check is None or not is_checked_early(head.content_length, head.headers):
            self._receive_body(data)
            return
        self._phase = _CHECKED
        self._keep_for_later(data)
        task = edge.loop.create_task(self._check_early(edge.early_check))
        edge.checks.add(task)
        task.add_done_callback(edge.checks.discard)

    async def _check_early(self, check: EarlyCheck) -> None:
        """Read the body, or answer at once that nobody wants it."""
        head = self._head
        is_wanted = await check(head.path, head.headers)
        if self._phase != _CHECKED:
            return
        data, self._buffer = self._buffer, b""
        self._resume_reading()
        if is_wanted:
            self._receive_body(data)
        else:
            head.keep_alive = False
            self._is_body_unread = True
            self._dispatch(b"", b"")

    def _receive_body(self, data: bytes) -> None:
        head = self._head
        if not self._reserve(max(head.content_length, 0)):
            return
        if not data and "expect" in head.headers and not head.is_http_1_0:
            self._transport.write(b"HTTP/1.1 100 Continue\r\n\r\n")
        if head.content_length < 0:
            self._phase = _CHUNKED_BODY
            self._decoder = ChunkedDecoder(self._edge.config.max_body_bytes)
            self._read_chunked_body(data)
        else:
            self._phase = _BODY
            self._pieces: list[bytes] = []
            self._missing = head.content_length
            self._read_body(data)

    def _reserve(self, num_bytes: int) -> bool:
        """Take room for a body up to ``num_bytes``; refuses the request when there is none."""
        if self._edge.bodies.take(num_bytes - self._num_reserved):
            self._num_reserved = num_bytes
            return True
        self._refuse(503, "too much is being sent at once, please try again", self._head.path)
        return False

    def _free_body(self) -> None:
        if self._num_reserved:
            self._edge.bodies.give_back(self._num_reserved)
            self._num_reserved = 0

    def _read_body(self, data: bytes) -> None:
        if len(data) < self._missing:
            self._pieces.append(data)
            self._missing -= len(data)
            self._extend_deadline(self._head.content_length - self._missing)
            return
        self._pieces.append(data[: self._missing])
        body = b"".join(self._pieces)
        self._pieces = []
        self._dispatch(body, data[self._missing :])

    def _read_chunked_body(self, data: bytes) -> None:
        decoder = self._decoder
        try:
            rest = decoder.feed(data)
        except BodyTooLargeError as error:
            self._refuse(413, str(error), self._head.path)
        except BadChunkError as error:
            self._refuse(400, f"malformed request: {error}", self._head.path)
        else:
            if decoder.num_bytes > self._num_reserved and not self._reserve(decoder.num_bytes):
                return
            if rest is None:
                self._extend_deadline(decoder.num_bytes)
            else:
                del self._decoder
                self._dispatch(decoder.body, rest)

    def _extend_deadline(self, num_bytes: int) -> None:
        allowance = self._edge.config.read_timeout_s + num_bytes / _MIN_BODY_BYTES_PER_S
        self.deadline = self._received_since + allowance

    def _dispatch(self, body: bytes, rest: bytes) -> None:
        edge = self._edge
        self._phase = _BUSY
        self._buffer = b""
        self._scanned = 0
        self.deadline = math.inf
        exchange = self._exchange = LeanExchange(self, self._head, body, self._peer)
        if rest:
            self._keep_for_later(rest)
        edge.tasks[exchange] = edge.loop.create_task(edge.run(self._handler, exchange))

    def _keep_for_later(self, data: bytes) -> None:
        self._buffer += data
        if len(self._buffer) > self._edge.config.max_header_bytes and not self._is_reading_paused:
            self._is_reading_paused = True
            self._transport.pause_reading()

    def _resume_reading(self) -> None:
        if self._is_reading_paused:
            self._is_reading_paused = False
            self._transport.resume_reading()

    def _continue(self) -> None:
        """Take up the bytes of a next request that came while the last one was in flight."""
        if self._phase == _HEAD and self._buffer:
            data, self._buffer = self._buffer, b""
            self.data_received(data)

    def _hand_over(self, data: bytes) -> None:
        edge = self._edge
        self._phase = _HANDED_OVER
        self._buffer = b""
        self.deadline = math.inf
        fallback = self._fallback = edge.make_fallback()
        fallback.connection_made(self._transport)
        fallback.data_received(data)

    # --- the exchange's side --------------------------------------------------------------------------------

    def date_line(self) -> str:
        return self._edge.date_line

    def wants_keep_alive(self) -> bool:
        return not self._edge.is_stopping

    def call_soon(self, callback: Callable[[], None]) -> None:
        self._edge.loop.call_soon(callback)

    def exchange_ended(self, keep_alive: bool) -> None:
        self._exchange = None
        self._free_body()
        if self._is_body_unread:
            self._linger()
            return
        if not keep_alive or self._edge.is_stopping:
            self._close()
            return
        self._phase = _HEAD
        self.deadline = self._edge.loop.time() + self._edge.config.keepalive_timeout_s
        self._resume_reading()
        if self._buffer:
            self._edge.loop.call_soon(self._continue)

    def exchange_aborted(self, is_visible: bool) -> None:
        self._exchange = None
        if (
            not is_visible
        ):  # an HTTP/1.0 stream ends with the connection: only a reset tells it from a clean end
            self._reset()
        else:
            self._close()

    # --- ends -----------------------------------------------------------------------------------------------

    def sweep(self, now: float) -> None:
        """The deadline has passed (called by the server)."""
        if self._phase == _CLOSING:
            self._transport.abort()
        elif self._phase in (_CHECKED, _BODY, _CHUNKED_BODY) or self._buffer:
            self._refuse(408, "the request did not arrive in time")
        elif self._phase == _HEAD:
            self._close()

    def sweep_stalled(self, now: float) -> None:
        """Abort when the client took nothing of a full write buffer for ``write_timeout_s``."""
        waiting = self._transport.get_write_buffer_size()
        if waiting != self._stalled_bytes:
            self._stalled_bytes = waiting
            self._stalled_since = now
        elif now - self._stalled_since >= self._edge.config.write_timeout_s:
            self._transport.abort()

    def close_if_idle(self) -> None:
        """The server is stopping: connections that wait for a next request, or for nothing, end now."""
        if self._phase == _CLOSING or (self._phase == _HEAD and not self._buffer):
            self._close()

    def abort(self) -> None:
        """The server's grace is over."""
        self._transport.abort()

    def _client_gone(self) -> None:
        exchange = self._exchange
        if exchange is not None:
            self._exchange = None
            exchange.client_gone()

    def _refuse(self, status: int, message: str, path: str = "") -> None:
        """Answer with an error."""
        self._free_body()
        headers, body = self._edge.refusal(path, status, message)
        framing = f"content-length: {len(body)}\r\nconnection: close\r\n{self._edge.date_line}"
        self._transport.write(response_head(status, headers, framing) + body)
        self._linger()

    def _linger(self) -> None:
        """Swallow for a while what still comes behind the answer: a reset would lose it."""
        self._transport.write_eof()
        self._resume_reading()
        self._phase = _CLOSING
        self._buffer = b""
        self.deadline = self._edge.loop.time() + LINGER_S

    def _close(self) -> None:
        """Close once what was written has left, or after ``write_timeout_s``."""
        self._phase = _CLOSING
        self._buffer = b""
        self.deadline = self._edge.loop.time() + self._edge.config.write_timeout_s
        self._transport.close()

    def _reset(self) -> None:
        self._phase = _CLOSING
        sock = self._transport.get_extra_info("socket")
        if sock is not None:
            sock.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
        self._transport.abort()
