"""The connections to one replica."""

from __future__ import annotations

import asyncio
import ssl
from collections.abc import Sequence
from functools import lru_cache
from urllib.parse import urlsplit

from gateway.config import ReplicaAddress, UpstreamConfig
from gateway.upstream.connection import ReplicaConnection
from gateway.upstream.errors import ReplicaUnreachableError

RequestHeaders = Sequence[tuple[str, str]]

_MAX_RECENT_HEADS = 64


class ReplicaPool:
    """Keeps at most ``max_connections_per_replica`` connections; the one used last is used next."""

    def __init__(
        self, replica: ReplicaAddress, config: UpstreamConfig, loop: asyncio.AbstractEventLoop
    ) -> None:
        parts = urlsplit(replica.url)
        if parts.scheme not in ("http", "https") or not parts.hostname:
            raise ValueError(f"url of replica {replica.id}: {replica.url!r} is not an http address")
        self._replica_id = replica.id
        self._config = config
        self._loop = loop
        self._host = parts.hostname
        self._port = parts.port or (443 if parts.scheme == "https" else 80)
        self._tls = ssl.create_default_context() if parts.scheme == "https" else None
        self._prefix = parts.path.rstrip("/")
        self._host_line = f" HTTP/1.1\r\nhost: {parts.netloc.rpartition('@')[2]}\r\n"
        self._recent_start = lru_cache(_MAX_RECENT_HEADS)(self._start_of_head)
        self._idle: list[ReplicaConnection] = []
        self._connections: set[ReplicaConnection] = set()
        self._num_connecting = 0

    @property
    def num_connections(self) -> int:
        """Open and opening connections."""
        return len(self._connections) + self._num_connecting

    def request_head(self, method: str, path: str, headers: RequestHeaders, body: bytes) -> bytes:
        """Build the head of a request.

        Raises:
            ValueError: path or a header holds a line break, space (path) or a character outside of Latin-1.
        """
        start = self._recent_start(method, path, tuple(headers))
        return f"{start}content-length: {len(body)}\r\n\r\n".encode("latin-1")

    def _start_of_head(self, method: str, path: str, headers: RequestHeaders) -> str:
        """All but the length: the same for most requests, unless they are traced."""
        block = "".join([f"{name}: {value}\r\n" for name, value in headers])
        if block.count("\n") != len(headers) or block.count("\r") != len(headers):
            raise ValueError("a request header holds a line break")
        if not path.startswith("/") or not path.isprintable() or " " in path:
            raise ValueError(f"path {path!r} cannot be requested")
        return f"{method} {self._prefix}{path}{self._host_line}{block}"

    def take_idle(self) -> ReplicaConnection | None:
        """Take a kept connection, if there is one that still lives."""
        while self._idle:
            connection = self._idle.pop()
            if connection.is_usable:
                return connection
        return None

    async def connect(self, timeout_s: float) -> ReplicaConnection:
        """Open a connection for one request.

        Raises:
            ReplicaUnreachableError: refused, not resolved, too slow, or the pool is at its bound.
        """
        if self.num_connections >= self._config.max_connections_per_replica:
            count = self._config.max_connections_per_replica
            raise ReplicaUnreachableError(self._replica_id, f"all {count} connections are in use")
        self._num_connecting += 1
        try:
            async with asyncio.timeout(timeout_s):
                _, connection = await self._loop.create_connection(
                    self._make_connection, self._host, self._port, ssl=self._tls
                )
        except TimeoutError:
            message = f"no connection within {timeout_s:g} s"
            raise ReplicaUnreachableError(self._replica_id, message) from None
        except OSError as error:
            raise ReplicaUnreachableError(self._replica_id, f"cannot connect: {error}") from error
        finally:
            self._num_connecting -= 1
        self._connections.add(connection)
        return connection

    def release(self, connection: ReplicaConnection) -> None:
        """Keep a connection for the next request (called by the connection)."""
        self._idle.append(connection)

    def forget(self, connection: ReplicaConnection) -> None:
        """A connection is gone (called by the connection)."""
        self._connections.discard(connection)
        if connection in self._idle:
            self._idle.remove(connection)

    def sweep(self, now: float) -> None:
        """Fail requests whose deadline passed and close connections that were idle for too long."""
        for connection in [one for one in self._idle if one.deadline <= now]:
            self._idle.remove(connection)
            connection.close()
        for connection in list(self._connections):
            connection.sweep(now)

    def close(self) -> None:
        """Close every connection; requests in flight fail as lost."""
        for connection in list(self._connections):
            connection.lose("the client was closed")

    def _make_connection(self) -> ReplicaConnection:
        return ReplicaConnection(self, self._replica_id, self._config, self._loop)
