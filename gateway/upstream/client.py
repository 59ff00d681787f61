"""Requests to replicas over pooled connections."""

from __future__ import annotations

from collections.abc import Sequence

from gateway.config import ReplicaAddress, UpstreamConfig
from gateway.upstream.response import ReplicaResponse

RequestHeaders = Sequence[tuple[str, str]]


class ReplicaClient:
    """Sends requests to replicas. Made and used inside a running event loop."""

    def __init__(self, config: UpstreamConfig) -> None:
        self._config = config

    async def open(
        self,
        replica: ReplicaAddress,
        path: str,
        headers: RequestHeaders,
        body: bytes = b"",
        *,
        method: str = "POST",
        timeout_s: float | None = None,
    ) -> ReplicaResponse:
        """Send a request and wait for the head of its answer.

        ``host``, ``content-length`` and ``connection`` are added here and must not be among ``headers``.
        ``timeout_s`` replaces ``request_timeout_s`` and, when smaller, the other deadlines too.

        Raises:
            ReplicaUnreachableError: no connection, or closed without a byte of an answer.
            ReplicaLostError: malformed or broken off inside the head.
            ReplicaTimeoutError: no head within the first-byte deadline.
        """
        raise ConnectionError

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
        """Send a small control call (health, stats, usages, abort) and return status and whole body."""
        raise ConnectionError

    async def close(self) -> None:
        """Close idle connections and abort those in use."""
