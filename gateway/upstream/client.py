"""Requests to replicas over pooled connections."""

from __future__ import annotations

import asyncio

from gateway.config import ReplicaAddress, UpstreamConfig
from gateway.upstream.errors import ReplicaUnreachableError
from gateway.upstream.pool import ReplicaPool, RequestHeaders
from gateway.upstream.response import ReplicaResponse

_SWEEP_S = 0.25


class ReplicaClient:
    """Sends requests to replicas. Used inside one running event loop."""

    def __init__(self, config: UpstreamConfig) -> None:
        self._config = config
        self._pools: dict[str, ReplicaPool] = {}
        self._sweeper: asyncio.TimerHandle | None = None
        self._sweep_s = min(
            _SWEEP_S, config.first_byte_timeout_s / 4, config.idle_timeout_s / 4, config.request_timeout_s / 4
        )
        self._is_closed = False

    async def open(
        self,
        replica: ReplicaAddress,
        path: str,
        headers: RequestHeaders,
        body: bytes = b"",
        *,
        method: str = "POST",
        timeout_s: float | None = None,
        first_byte_timeout_s: float | None = None,
    ) -> ReplicaResponse:
        """Send a request and wait for the head of its answer.

        ``host`` and ``content-length`` are added here and must not be among ``headers``. ``timeout_s``
        replaces ``request_timeout_s`` and, when smaller, shortens the other deadlines too;
        ``first_byte_timeout_s`` replaces the configured one. Cancelling aborts.

        Raises:
            ReplicaUnreachableError: no connection, or closed without a byte of an answer.
            ReplicaLostError: malformed or broken off inside the head.
            ReplicaTimeoutError: no head within the first-byte deadline.
            ValueError: a header or the path holds a line break.
        """
        if self._is_closed:
            raise ReplicaUnreachableError(replica.id, "the client was closed")
        pool = self._pools.get(replica.url) or self._add_pool(replica)
        head = pool.request_head(method, path, headers, body)
        kept = pool.take_idle()
        if kept is not None:
            answer = kept.send(head, body, timeout_s, first_byte_timeout_s)
            try:
                await answer.head
                return answer
            except asyncio.CancelledError:
                answer.abort()
                raise
            except ReplicaUnreachableError:
                pass  # the replica closed a kept connection as we reached for it: ask once more, on a new one
        connect_s = self._config.connect_timeout_s
        fresh = await pool.connect(connect_s if timeout_s is None else min(connect_s, timeout_s))
        answer = fresh.send(head, body, timeout_s, first_byte_timeout_s)
        try:
            await answer.head
        except asyncio.CancelledError:
            answer.abort()
            raise
        return answer

    async def fetch(
        self,
        replica: ReplicaAddress,
        path: str,
        headers: RequestHeaders = (),
        body: bytes = b"",
        *,
        method: str = "GET",
        timeout_s: float | None = None,
        limit: int | None = None,
    ) -> tuple[int, bytes]:
        """Send a small control call (health, stats, usages, abort) and return status and whole body.

        Raises:
            ReplicaError: as :meth:`open` and :meth:`~gateway.upstream.response.ReplicaResponse.read` do.
        """
        response = await self.open(replica, path, headers, body, method=method, timeout_s=timeout_s)
        return response.status, await response.read(limit)

    def num_connections(self, replica: ReplicaAddress) -> int:
        """Open connections to a replica, idle ones included."""
        pool = self._pools.get(replica.url)
        return 0 if pool is None else pool.num_connections

    async def close(self) -> None:
        """Close all connections; requests in flight fail as lost."""
        self._is_closed = True
        if self._sweeper is not None:
            self._sweeper.cancel()
            self._sweeper = None
        for pool in self._pools.values():
            pool.close()
        await asyncio.sleep(0)  # lets the transports say goodbye before a loop that ends now

    def _add_pool(self, replica: ReplicaAddress) -> ReplicaPool:
        loop = asyncio.get_running_loop()
        pool = self._pools[replica.url] = ReplicaPool(replica, self._config, loop)
        if self._sweeper is None:
            self._sweeper = loop.call_later(self._sweep_s, self._sweep, loop)
        return pool

    def _sweep(self, loop: asyncio.AbstractEventLoop) -> None:
        """Find requests whose deadline passed: one timer for all is cheaper than one for each."""
        now = loop.time()
        for pool in self._pools.values():
            pool.sweep(now)
        self._sweeper = loop.call_later(self._sweep_s, self._sweep, loop)
