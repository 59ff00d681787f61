"""The thread that moves usage records from the spool to the store."""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable

from billing.rates import RateBook
from billing.spool import Spool
from billing.store import Store, StoreError

_RETRY_MIN_S = 0.1
_IDLE_WAIT_S = 1.0


class Poster:
    """Posts in batches, in order, at least once; the store makes that exactly once.

    The thread begins with what a killed process left. While the store is unavailable it waits, longer each
    time up to ``retry_max_s``, and says so in the log; the spool holds the records meanwhile.
    """

    def __init__(
        self,
        spool: Spool,
        store: Store,
        rate_book: RateBook,
        monotonic: Callable[[], float] = time.monotonic,
    ) -> None:
        self._spool = spool
        self._store = store
        self._rate_book = rate_book
        self._config = spool.config
        self._monotonic = monotonic
        self._log = logging.getLogger(__name__)
        self._stopping = threading.Event()
        self._thread: threading.Thread | None = None
        self._error: BaseException | None = None
        self._is_away = False

    @property
    def is_away(self) -> bool:
        """Whether the database did not answer when it was last used here."""
        return self._is_away

    @property
    def error(self) -> BaseException | None:
        """Why the thread ended by itself; None while it is healthy."""
        return self._error

    def start(self) -> None:
        """Start the thread, which begins with what a killed process left."""
        if self._spool.num_unposted:
            self._log.info("posting %d usage records that were left in the spool", self._spool.num_unposted)
        self._thread = threading.Thread(target=self._run, name="billing-poster", daemon=True)
        self._thread.start()

    def stop(self) -> int:
        """Post what is left within ``stop_timeout_s``, end the thread; returns the records still unposted."""
        self._stopping.set()
        self._spool.wake()
        if self._thread is not None:
            self._thread.join()
        return self._spool.num_unposted

    def post_once(self) -> int:
        """Move one batch; returns its size, 0 when nothing waits. Raises StoreError."""
        batch = self._spool.read_batch(self._config.max_post_batch)
        if batch is None:
            return 0
        result = self._store.post(batch.records, self._rate_book)
        self._spool.mark_posted(batch)
        if result.num_unpriced:
            self._log.error(
                "%d usage records had no rate card in force and were posted without a charge",
                result.num_unpriced,
            )
        return len(batch.records)

    def drain(self) -> int:
        """Post everything that waits; returns how many. Raises StoreError."""
        total = 0
        while posted := self.post_once():
            total += posted
        return total

    def _run(self) -> None:
        try:
            self._post_with_patience()
            while not self._stopping.is_set():
                if self._spool.wait(_IDLE_WAIT_S):
                    self._stopping.wait(self._config.post_interval_s)  # let a batch gather
                    self._post_with_patience()
            self._post_the_rest()
        except BaseException as error:
            self._error = error
            self._log.critical("posting usage records has ended; they stay in the spool", exc_info=error)
            raise

    def _post_with_patience(self) -> None:
        """Post until less than a batch waits and the database answers, or the poster is stopped.

        The rest waits for the next round: under load, records arrive while others are posted, and a database
        transaction for each few of them costs several times as much as one for all.
        """
        delay_s = _RETRY_MIN_S
        while not self._stopping.is_set():
            try:
                self._store.bring_up_to_date()
                is_done = not self.post_once() or self._spool.num_unposted < self._config.max_post_batch
            except StoreError as error:
                self._log.warning(
                    "%s; %d usage records wait in the spool, next attempt in %.1f s",
                    error,
                    self._spool.num_unposted,
                    delay_s,
                )
                self._is_away = True
                self._stopping.wait(delay_s)
                delay_s = min(2 * delay_s, self._config.retry_max_s)
                continue
            if self._is_away:
                self._log.warning("the database answers again")
                self._is_away = False
            if is_done:
                return
            delay_s = _RETRY_MIN_S

    def _post_the_rest(self) -> None:
        deadline = self._monotonic() + self._config.stop_timeout_s
        try:
            while self._monotonic() < deadline and self.post_once():
                pass
        except StoreError as error:
            self._log.warning("%s; the next start posts %d usage records", error, self._spool.num_unposted)
