"""An exchange without a network: the request is an item, the answer stays in memory."""

from __future__ import annotations

from collections.abc import Callable, Mapping

from gateway.edge.exchange import Headers, ResponseStateError


class MemoryExchange:
    """See :class:`gateway.edge.exchange.Exchange`. The client "leaves" by :meth:`leave`.

    Answers in one piece only: nobody asks for the stream of an item.
    """

    method = "POST"
    path = ""
    query = ""
    peer = ""
    is_writable = True

    def __init__(self, body: bytes, headers: Mapping[str, str]) -> None:
        self.body = body
        self.headers = headers
        self.is_disconnected = False
        self.status = 0
        self.answer = b""
        self._on_disconnect: Callable[[], None] | None = None

    @property
    def is_started(self) -> bool:
        return self.status != 0

    def leave(self) -> None:
        """Want no answer any more, so that the replica is free at once."""
        if self.is_started or self.is_disconnected:
            return
        self.is_disconnected = True
        callback, self._on_disconnect = self._on_disconnect, None
        if callback is not None:
            callback()

    def on_disconnect(self, callback: Callable[[], None] | None) -> None:
        """As in the protocol."""
        self._on_disconnect = callback
        if callback is not None and self.is_disconnected:
            self._on_disconnect = None
            callback()

    def on_writable(self, callback: Callable[[bool], None] | None) -> None:
        """Memory is always writable."""

    def respond(self, status: int, headers: Headers, body: bytes) -> None:
        """Keep the answer; of one who left, nothing."""
        if self.is_started:
            raise ResponseStateError("the answer was already started")
        if not self.is_disconnected:
            self.status, self.answer = status, body

    def start_stream(self, status: int, headers: Headers) -> None:
        raise ResponseStateError("an item is answered in one piece")

    def write(self, data: bytes) -> None:
        raise ResponseStateError("an item is answered in one piece")

    def finish(self, data: bytes = b"") -> None:
        raise ResponseStateError("an item is answered in one piece")

    def abort(self) -> None:
        """Nothing is left to cut."""
