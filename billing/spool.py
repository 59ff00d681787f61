"""The durable journal between the edge and the store: what is appended here will be billed, once.

Append-only segment files of CRC-framed groups of records. An append is one write and one ``fdatasync``; when it
returns, the records survive the process and the machine. One process at a time may have a spool open.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from billing.config import SpoolConfig
from billing.usage import UsageRecord


class SpoolError(RuntimeError):
    """The journal cannot be opened or written; the message says why and what to do."""


class SpoolFullError(SpoolError):
    """The disk or the configured limit of unposted records is full. Nothing of the append counts."""


class SpoolLockedError(SpoolError):
    """Another process has this spool open."""


class SpoolCorruptError(SpoolError):
    """Acknowledged records were damaged on disk. Refused, because going on would lose bills silently."""


class Spool:
    """Opens (and locks) ``directory``, recovers what a killed process left. Thread-safe: one appender, one poster."""

    def __init__(self, directory: Path, config: SpoolConfig) -> None:
        raise NotImplementedError

    def append(self, records: Sequence[UsageRecord]) -> None:
        """Make the records durable, all or none. Blocks for one disk flush. Raises SpoolError; then none counts."""
        raise NotImplementedError

    @property
    def num_unposted(self) -> int:
        """Records appended and not yet posted."""
        raise NotImplementedError

    def close(self) -> None:
        """Release the lock; delete what was posted."""
        raise NotImplementedError
