"""The only code that speaks to a replica.

:class:`ReplicaClient` keeps a bounded pool of keep-alive connections per replica. A request that meets a
stale kept connection (closed by the replica before any byte of the answer) is sent once more on a fresh one;
every other failure is the caller's to decide upon, see :mod:`gateway.upstream.errors`.

Example::

    response = await client.open(replica, "/v1/chat/completions", headers, body)
    if response.status == 200:
        await response.relay(stream_relay.feed)
    else:
        error = await response.read(64 * 1024)
"""

from __future__ import annotations

from gateway.upstream.client import ReplicaClient
from gateway.upstream.errors import (
    ReplicaAbortedError,
    ReplicaAnswerTooLargeError,
    ReplicaError,
    ReplicaLostError,
    ReplicaTimeoutError,
    ReplicaUnreachableError,
)
from gateway.upstream.response import ReplicaResponse

__all__ = [
    "ReplicaAbortedError",
    "ReplicaAnswerTooLargeError",
    "ReplicaClient",
    "ReplicaError",
    "ReplicaLostError",
    "ReplicaResponse",
    "ReplicaTimeoutError",
    "ReplicaUnreachableError",
]
