"""How a request to a replica can fail."""

from __future__ import annotations


class ReplicaError(Exception):
    """A request to a replica failed; ``replica_id`` says which."""

    def __init__(self, replica_id: str, message: str) -> None:
        super().__init__(f"replica {replica_id}: {message}")
        self.replica_id = replica_id


class ReplicaUnreachableError(ReplicaError):
    """No byte of an answer came and the replica did not work on the request to an end: safe to try the next
    one.
    """


class ReplicaLostError(ReplicaError):
    """The answer broke off or was malformed after its first byte."""


class ReplicaTimeoutError(ReplicaError):
    """A deadline passed. ``phase`` is ``first_byte``, ``idle`` or ``total`` (connecting counts as
    unreachable).
    """

    def __init__(self, replica_id: str, phase: str, timeout_s: float) -> None:
        super().__init__(replica_id, f"{phase} timeout of {timeout_s:g} s passed")
        self.phase = phase
        self.timeout_s = timeout_s


class ReplicaAnswerTooLargeError(ReplicaLostError):
    """The answer's body passed ``max_response_bytes``."""


class ReplicaAbortedError(ReplicaError):
    """The answer was given up by :meth:`~gateway.upstream.response.ReplicaResponse.abort` on our side."""
