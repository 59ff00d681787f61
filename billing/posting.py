"""The thread that moves usage records from the spool to the store."""

from __future__ import annotations

from billing.rates import RateBook
from billing.spool import Spool
from billing.store import Store


class Poster:
    """Posts in batches, in order, at least once; the store makes that exactly once.

    ``start`` begins with what a killed process left. While the store is unavailable it waits, longer each time,
    and says so in the log once per outage; the spool holds the records meanwhile.
    """

    def __init__(self, spool: Spool, store: Store, rate_book: RateBook) -> None:
        raise NotImplementedError

    def start(self) -> None:
        """Start the thread."""
        raise NotImplementedError

    def stop(self) -> int:
        """Post what is left within the configured time, end the thread; returns the records still unposted."""
        raise NotImplementedError

    def post_once(self) -> int:
        """Move one batch; returns its size, 0 when nothing waits. Raises StoreError."""
        raise NotImplementedError

    def drain(self) -> int:
        """Post everything that waits; returns how many. For start-up and tests. Raises StoreError."""
        raise NotImplementedError

    @property
    def error(self) -> BaseException | None:
        """Why the thread ended by itself; None while it is healthy."""
        raise NotImplementedError
