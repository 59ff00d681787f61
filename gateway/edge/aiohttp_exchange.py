"""Runs an exchange handler as an aiohttp route."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Mapping

from aiohttp import HttpVersion11, web

from gateway.config import GatewayConfig
from gateway.edge.admission import BodyBudget, EarlyCheck, is_checked_early
from gateway.edge.exchange import Exchange, Handler, Headers, ResponseStateError

_NEW, _STREAMING, _ENDED, _ABORTED = range(4)


class BodiesFullError(RuntimeError):
    """Too many bytes of request bodies are in memory already."""


async def serve_exchange(
    request: web.Request,
    handler: Handler,
    config: GatewayConfig,
    *,
    early_check: EarlyCheck | None = None,
    bodies: BodyBudget | None = None,
) -> web.StreamResponse:
    """Read the body, run ``handler`` on an :class:`~gateway.edge.exchange.Exchange` over ``request``, answer
    it.

    The server must cancel request handlers when the client goes (``handler_cancellation``); the exchange's
    handler itself is never cancelled, it is told. ``early_check`` and ``bodies`` as in
    :class:`gateway.edge.server.EdgeServer`.

    Raises:
        BodiesFullError: ``bodies`` has no room for this one.
    """
    if not await _is_wanted(request, early_check):
        response = await _serve(request, b"", handler, config)
        response.force_close()
        return response
    length = request.content_length
    num_bytes = config.max_body_bytes if length is None else min(length, config.max_body_bytes)
    if bodies is None:
        return await _serve(request, await request.read(), handler, config)
    if not bodies.take(num_bytes):
        raise BodiesFullError
    try:
        return await _serve(request, await request.read(), handler, config)
    finally:
        bodies.give_back(num_bytes)


async def expect_continue(request: web.Request, early_check: EarlyCheck) -> None:
    """Invite the body that a client announces, if it is wanted (an aiohttp ``expect_handler``)."""
    if request.version != HttpVersion11:
        return
    expectation = request.headers.get("expect", "")
    if expectation.lower() != "100-continue":
        raise web.HTTPExpectationFailed(text=f"expectation {expectation!r} is not supported")
    if await _is_wanted(request, early_check) and request.transport is not None:
        request.transport.write(b"HTTP/1.1 100 Continue\r\n\r\n")


async def _is_wanted(request: web.Request, early_check: EarlyCheck | None) -> bool:
    headers = _plain_headers(request)
    length = request.content_length
    if early_check is None or not request.body_exists:
        return True
    if not is_checked_early(-1 if length is None else length, headers):
        return True
    return await early_check(request.raw_path.partition("?")[0], headers)


async def _serve(
    request: web.Request, body: bytes, handler: Handler, config: GatewayConfig
) -> web.StreamResponse:
    exchange = AiohttpExchange(request, body, config.write_buffer_bytes)
    task = asyncio.get_running_loop().create_task(handler(_checked(exchange)))
    task.add_done_callback(exchange.handler_returned)
    try:
        response = await exchange.answer(config.write_timeout_s)
    except (asyncio.CancelledError, ConnectionError):
        exchange.client_gone()
        await asyncio.wait([task])
        raise
    await asyncio.wait([task])
    if (error := task.exception()) is not None:
        raise error
    return response


def _checked(exchange: AiohttpExchange) -> Exchange:
    """State to the type checker that the adapter is an exchange."""
    return exchange


class AiohttpExchange:
    """See :class:`gateway.edge.exchange.Exchange`. A pump carries pieces from the handler to aiohttp's
    response.
    """

    def __init__(self, request: web.Request, body: bytes, max_buffered: int) -> None:
        self._request = request
        self._max_buffered = max_buffered
        self._state = _NEW
        self._status = 500
        self._answer_headers: Headers = ()
        self._is_stream = False
        self._pieces: list[bytes] = []
        self._num_buffered = 0
        self._is_writable = True
        self._wake = asyncio.Event()
        self._on_disconnect: Callable[[], None] | None = None
        self._on_writable: Callable[[bool], None] | None = None
        self._is_disconnected = False
        path, _, query = request.raw_path.partition("?")
        self.method = request.method
        self.path = path
        self.query = query
        self.body = body
        self.peer = request.remote or ""
        self.headers: Mapping[str, str] = _plain_headers(request)

    @property
    def is_started(self) -> bool:
        return self._state != _NEW

    @property
    def is_disconnected(self) -> bool:
        return self._is_disconnected

    @property
    def is_writable(self) -> bool:
        return self._is_writable

    def on_disconnect(self, callback: Callable[[], None] | None) -> None:
        self._on_disconnect = callback
        if callback is not None and self._is_disconnected:
            self._on_disconnect = None
            callback()

    def on_writable(self, callback: Callable[[bool], None] | None) -> None:
        self._on_writable = callback

    def respond(self, status: int, headers: Headers, body: bytes) -> None:
        self._start(status, headers)
        self._pieces.append(body)
        self._state = _ENDED
        self._wake.set()

    def start_stream(self, status: int, headers: Headers) -> None:
        self._start(status, headers)
        self._is_stream = True
        self._state = _STREAMING
        self._wake.set()

    def write(self, data: bytes) -> None:
        if self._is_disconnected or not data:
            return
        if self._state != _STREAMING:
            raise ResponseStateError("write outside of a stream")
        self._pieces.append(data)
        self._num_buffered += len(data)
        self._wake.set()
        if self._is_writable and self._num_buffered > self._max_buffered:
            self._is_writable = False
            if self._on_writable is not None:
                self._on_writable(False)

    def finish(self, data: bytes = b"") -> None:
        self.write(data)
        if self._state != _STREAMING:
            if self._is_disconnected:
                return
            raise ResponseStateError("finish outside of a stream")
        self._state = _ENDED
        self._wake.set()

    def abort(self) -> None:
        if self._state not in (_ENDED, _ABORTED):
            self._state = _ABORTED
            self._wake.set()

    def client_gone(self) -> None:
        """The connection ended before the answer did."""
        self._is_disconnected = True
        callback, self._on_disconnect, self._on_writable = self._on_disconnect, None, None
        if callback is not None and self._state not in (_ENDED, _ABORTED):
            callback()

    def handler_returned(self, task: asyncio.Task[None]) -> None:
        """The handler's task is over; an answer that it left open is cut (a done callback)."""
        if self._state == _NEW:
            self._start(500, (("content-type", "text/plain"),))
            self._pieces.append(b"internal error\n")
            self._state = _ENDED
            self._wake.set()
        elif self._state == _STREAMING:
            self.abort()

    async def answer(self, write_timeout_s: float) -> web.StreamResponse:
        """Carry out the answer as the handler gives it.

        Raises:
            ConnectionError: the client went, or took nothing for ``write_timeout_s``.
        """
        await self._wake.wait()
        if not self._is_stream:
            if self._state == _ABORTED:
                return self._cut(web.Response())
            response = web.Response(status=self._status, body=b"".join(self._pieces))
            _set_headers(response, self._answer_headers)
            return response
        stream = web.StreamResponse(status=self._status)
        _set_headers(stream, self._answer_headers)
        await stream.prepare(self._request)
        while True:
            self._wake.clear()
            while self._pieces:
                data = b"".join(self._pieces)
                self._pieces.clear()
                try:
                    await asyncio.wait_for(stream.write(data), write_timeout_s)
                except TimeoutError:
                    self._cut(stream)
                    raise ConnectionResetError("the client does not read") from None
                self._written(len(data))
            if self._state == _ENDED:
                await stream.write_eof()
                return stream
            if self._state == _ABORTED:
                return self._cut(stream)
            await self._wake.wait()

    def _start(self, status: int, headers: Headers) -> None:
        if self._state != _NEW:
            raise ResponseStateError("the answer was already started")
        if any("\r" in value or "\n" in value for _, value in headers):
            raise ValueError("a response header holds a line break")
        self._status = status
        self._answer_headers = headers

    def _written(self, num_bytes: int) -> None:
        self._num_buffered -= num_bytes
        if not self._is_writable and self._num_buffered <= self._max_buffered // 4:
            self._is_writable = True
            if self._on_writable is not None:
                self._on_writable(True)

    def _cut(self, response: web.StreamResponse) -> web.StreamResponse:
        """Close the connection behind what was written, so that no clean end can follow."""
        if self._request.transport is not None:
            self._request.transport.close()
        return response


def _plain_headers(request: web.Request) -> dict[str, str]:
    headers: dict[str, str] = {}
    for raw_name, raw_value in request.raw_headers:
        name = raw_name.decode("latin-1").lower()
        value = raw_value.decode("latin-1")
        headers[name] = f"{headers[name]}, {value}" if name in headers else value
    return headers


def _set_headers(response: web.StreamResponse, headers: Headers) -> None:
    for name, value in headers:
        response.headers.add(name, value)
