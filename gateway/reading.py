"""Questions to the database, off the event loop: few at once, few waiting, none for long."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import TypeVar

from sqlalchemy import Connection

from billing.store import QueryTimeoutError, Store, StoreError
from gateway.config import AnalyticsConfig
from gateway.errors import Reason, Refusal, accounts_unavailable

_log = logging.getLogger(__name__)

T = TypeVar("T")


class UsageReader:
    """Runs questions in a few threads of its own. Belongs to one event loop; close it at the end."""

    def __init__(self, store: Store, config: AnalyticsConfig) -> None:
        self._store = store
        self._config = config
        self._threads = ThreadPoolExecutor(config.max_concurrent_reads, thread_name_prefix="usage-reader")
        self._num_in_hand = 0

    async def read(self, question: Callable[[Connection], T]) -> T:
        """The answer of ``question``, which sees one state of the database.

        Raises:
            Refusal: 429 when too many wait, 408 when it takes too long, 503 when the database is away.
        """
        return await self.call(lambda: self._ask(question))

    async def call(self, work: Callable[[], T]) -> T:
        """The same for work that opens the database by itself. Raises Refusal as :meth:`read` does."""
        config = self._config
        if self._num_in_hand >= config.max_concurrent_reads + config.max_waiting_reads:
            raise Refusal(Reason.CAPACITY, "Too many questions at once, please try again.", retry_after_s=1)
        self._num_in_hand += 1
        try:
            running = asyncio.get_running_loop().run_in_executor(self._threads, work)
            running.add_done_callback(self._answered)
        except BaseException:
            self._num_in_hand -= 1
            raise
        try:
            return await asyncio.shield(running)
        except QueryTimeoutError as error:
            raise Refusal(
                Reason.TIMEOUT, "The question took too long; ask for less time or fewer groups."
            ) from error
        except StoreError as error:
            _log.warning("usage could not be read: %s", error)
            raise accounts_unavailable() from error

    def close(self) -> None:
        """Wait for what is being asked; what waits is dropped. Blocking."""
        self._threads.shutdown(wait=True, cancel_futures=True)

    def _ask(self, question: Callable[[Connection], T]) -> T:
        with self._store.reading_within(self._config.read_timeout_s) as connection:
            return question(connection)

    def _answered(self, work: asyncio.Future[T]) -> None:
        """Counted here, since the thread goes on when whoever asked has left."""
        self._num_in_hand -= 1
        if not work.cancelled():
            work.exception()  # retrieved, should nobody wait any more
