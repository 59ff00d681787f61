"""The database: usage records, transactions and ledger entries, accounts.

SQLite by default, PostgreSQL by URL. Usage and ledger tables are append-only; triggers refuse anything else.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence

import msgspec

from billing.rates import RateBook
from billing.usage import UsageRecord


class StoreError(RuntimeError):
    """The database cannot be opened or does not answer. Trying again later may help."""


class PostResult(msgspec.Struct, frozen=True):
    """What one call of :meth:`Store.post` did. ``num_unpriced`` of the posted had no rate card in force."""

    num_posted: int
    num_duplicates: int
    num_unpriced: int


class Store:
    """One database. Synchronous and thread-safe; every call is one transaction."""

    @classmethod
    def open(cls, url: str, *, sqlite_synchronous: str = "full") -> Store:
        """Connect and bring the schema up to date. Raises StoreError with one sentence that says what to do."""
        raise NotImplementedError

    def close(self) -> None:
        raise NotImplementedError

    def post(self, records: Sequence[UsageRecord], rate_book: RateBook) -> PostResult:
        """Price and write the records, each with its transaction and entries, in one database transaction.

        Idempotent: a request id that is already there is left exactly as it is. Raises StoreError; then nothing
        was written.
        """
        raise NotImplementedError

    def has_record(self, request_ids: Collection[str]) -> set[str]:
        """Those of ``request_ids`` that have been posted."""
        raise NotImplementedError
