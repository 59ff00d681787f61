"""One request and its answer, seen by a handler that does not know the transport.

Two transports implement :class:`Exchange`: the lean protocol of the hot routes
(:mod:`gateway.edge.protocol`) and an adapter over aiohttp (:mod:`gateway.edge.aiohttp_exchange`), so that
every handler also works as an ordinary aiohttp route. The answer side is synchronous: bytes are buffered by
the transport, and slow readers show in :attr:`Exchange.is_writable` instead of in an await per chunk.
"""

from __future__ import annotations

from collections.abc import Callable, Coroutine, Mapping, Sequence
from typing import Any, Protocol

Headers = Sequence[tuple[str, str]]
"""Response headers in order. Framing (``content-length``, ``transfer-encoding``, ``connection``) belongs to
the transport and must not be among them."""


class ResponseStateError(RuntimeError):
    """The handler broke the order of an answer, for example by starting it twice."""


class Exchange(Protocol):
    """A request that was read completely, and the means to answer it once.

    Order of an answer: either one :meth:`respond`, or :meth:`start_stream`, any number of :meth:`write`, then
    :meth:`finish` (clean end) or :meth:`abort` (the client can tell that the answer is not complete). After
    the client has gone all of these are silent no-ops, so that a handler need not check before each call.
    All methods belong to the event loop's thread.
    """

    @property
    def method(self) -> str:
        """Upper-case method."""

    @property
    def path(self) -> str:
        """Path as it came over the wire: still percent-encoded, without the query."""

    @property
    def query(self) -> str:
        """Raw query string without the question mark; may be empty."""

    @property
    def headers(self) -> Mapping[str, str]:
        """Request headers, names in lower case; repeated ones are joined with ``", "``."""

    @property
    def body(self) -> bytes:
        """The whole request body, bounded by ``max_body_bytes``."""

    @property
    def peer(self) -> str:
        """Address of the socket's other end (never taken from a header)."""

    @property
    def is_started(self) -> bool:
        """True once :meth:`respond` or :meth:`start_stream` was called."""

    @property
    def is_disconnected(self) -> bool:
        """True once the client closed, half-closed or reset its connection before the answer's end."""

    @property
    def is_writable(self) -> bool:
        """False while more than ``write_buffer_bytes`` wait for a slow reader."""

    def on_disconnect(self, callback: Callable[[], None] | None) -> None:
        """Call ``callback`` once when the client goes before the answer ended (at once, if it already has).

        A later call replaces the callback, ``None`` removes it. It is not called after the answer ended.
        """

    def on_writable(self, callback: Callable[[bool], None] | None) -> None:
        """Call ``callback(False)`` when the write buffer fills and ``callback(True)`` when it has drained.

        A later call replaces the callback, ``None`` removes it.
        """

    def respond(self, status: int, headers: Headers, body: bytes) -> None:
        """Send a complete answer with a ``content-length``.

        Raises:
            ResponseStateError: the answer was already started.
            ValueError: a header holds a line break.
        """

    def start_stream(self, status: int, headers: Headers) -> None:
        """Start an answer of unknown length. Its head leaves together with a :meth:`write` of the same
        moment.
        """

    def write(self, data: bytes) -> None:
        """Send ``data`` (not empty) as one piece of a started stream."""

    def finish(self, data: bytes = b"") -> None:
        """End a started stream cleanly, with a last piece that leaves together with the end."""

    def abort(self) -> None:
        """Close the connection without a clean end, after what was written so far has left."""


Handler = Callable[[Exchange], Coroutine[Any, Any, None]]
"""A hot route. Must answer the exchange before it returns; when it does not, the transport answers 500 or
aborts.
"""
