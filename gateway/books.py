"""The ledger as the edge has it: built by :mod:`gateway.app`, which starts and closes it."""

from __future__ import annotations

import logging
from collections.abc import Callable
from pathlib import Path

from billing.accounts import AccountDirectory
from billing.config import BillingConfig
from billing.late_cards import HOW_TO_MEND, late_cards
from billing.posting import Poster
from billing.rates import RateBook
from billing.spool import Spool, read_spooled
from billing.store import Store, StoreAwayError, StoreError
from billing.usage import UsageRecord

_log = logging.getLogger(__name__)
_CARDS_TIMEOUT_S = 5.0


class Books:
    """The ledger as the edge has it: a journal that records go to, and a thread that posts them from
    there.
    """

    def __init__(self, billing: BillingConfig, data_dir: Path) -> None:
        """Opens the store and locks the journal. A database that is away may come later.

        Raises:
            StoreError, SpoolError, billing.config.BillingConfigError: what waiting does not mend.
        """
        self.rate_book = RateBook.from_config(billing)
        self.store = Store.of_config(billing, data_dir, may_be_away=True)
        self.spool = Spool(data_dir / "spool", billing.spool)
        self.accounts = AccountDirectory(self.store)
        self._poster = Poster(self.spool, self.store, self.rate_book)

    def start(self) -> None:
        """Post what an earlier process left, if the database answers, and go on posting. Blocking."""
        try:
            self._poster.drain()
        except StoreAwayError as error:
            _log.warning("%s; usage records wait in the journal, and no API token can be checked", error)
        self._warn_of_late_cards()
        self._poster.start()

    def _warn_of_late_cards(self) -> None:
        """Serving goes on: what was billed is right, and what is billed from now on follows the new card."""
        try:
            with self.store.reading_within(_CARDS_TIMEOUT_S) as connection:
                found = late_cards(connection, self.rate_book)
        except StoreError as error:
            _log.warning("whether rate cards reach back over billed requests is not known: %s", error)
            return
        for late in found:
            _log.warning("%s; embergate audit will fail; %s", late, HOW_TO_MEND)

    @property
    def trouble(self) -> str:
        """Why nothing is posted at present; empty when all is well."""
        if self._poster.error is not None:
            return "posting usage records has ended; they wait in the journal for a restart"
        if self._poster.is_away or not self.store.is_current:
            return "the database does not answer"
        return ""

    def left_over(self) -> list[UsageRecord]:
        """The records in the journal; before the first request, those that an earlier process left there."""
        return list(read_spooled(self.spool.directory)) if self.spool.num_unposted else []

    def close(self, when_all_is_posted: Callable[[], None]) -> None:
        """Post what waits and close. Blocking."""
        num_left = self._poster.stop()
        if num_left:
            _log.warning("%d usage records wait in the journal for the next start", num_left)
        else:
            when_all_is_posted()
        self.spool.close()
        self.store.close()
