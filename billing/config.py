"""Configuration of the counting house. Prices are decimal strings, so that no float touches money."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Literal

import msgspec
from msgspec import Meta


class BillingConfigError(ValueError):
    """A value that cannot be used; ``path`` names it as it stands in the configuration file."""

    def __init__(self, path: str, problem: str) -> None:
        super().__init__(f"{path}: {problem}")
        self.path = path


class _Section(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """A configuration section: immutable, and a typo in a key is an error."""


class BatchPricesConfig(_Section, frozen=True, kw_only=True):
    """Prices of requests that come through a batch; as in the card that they belong to."""

    input: str
    output: str
    cached_input: str | None = None


class RateCardConfig(_Section, frozen=True, kw_only=True):
    """Prices of one model from ``effective_from`` (a UTC date, inclusive) on, in dollars per million tokens.

    ``cached_input`` null means that cached tokens cost as much as other input, never nothing. ``batch`` null
    means that batches pay the same. A card with an ``account`` holds for that account alone, before the
    others, until the date ``effective_until`` (exclusive) when there is one.
    """

    model: str
    effective_from: str
    input: str
    output: str
    cached_input: str | None = None
    batch: BatchPricesConfig | None = None
    account: str | None = None
    effective_until: str | None = None


class AccountBillingConfig(_Section, frozen=True, kw_only=True):
    """What differs for one account; null takes what holds for all."""

    free_neurons_per_day: Annotated[int, Meta(ge=0)] | None = None


class PriceListConfig(_Section, frozen=True, kw_only=True):
    """Someone's public prices to compare with, in dollars per million tokens, as of a date.

    ``source`` says where they were published. ``cached_input`` null means that cached tokens cost as much as
    other input.
    """

    name: str
    source: str
    as_of: str
    input: str
    output: str
    cached_input: str | None = None


class SpoolConfig(_Section, frozen=True, kw_only=True):
    """The durable journal in front of the store, and the thread that empties it.

    ``max_unposted_records`` bounds how far the store may fall behind before requests are refused.
    ``reserve_bytes`` are taken from the disk ahead of need, which makes a flush faster.
    ``post_interval_s`` is how long records gather before they are posted in one batch.
    ``retry_max_s`` bounds the wait between attempts while the store is unavailable.
    ``stop_timeout_s`` bounds how long a clean stop may go on posting what is left.
    """

    max_segment_bytes: int = 16 * 1024 * 1024
    reserve_bytes: int = 256 * 1024
    max_unposted_records: int = 1_000_000
    post_interval_s: float = 0.2
    max_post_batch: int = 500
    retry_max_s: float = 5.0
    stop_timeout_s: float = 20.0


class BillingConfig(_Section, frozen=True, kw_only=True):
    """``database_url`` empty means SQLite in the data directory.

    ``sqlite_synchronous`` full flushes every commit to the disk; normal may lose the last commits in a power
    cut, which the audit would then report.

    Each account has ``free_neurons_per_day`` a UTC day that cost nothing; ``accounts`` overrides that by
    account id.
    """

    database_url: str = ""
    sqlite_synchronous: Literal["full", "normal"] = "full"
    currency: str = "USD"
    usd_per_thousand_neurons: str = "0.011"
    rate_cards: list[RateCardConfig] = []
    free_neurons_per_day: Annotated[int, Meta(ge=0)] = 0
    accounts: dict[str, AccountBillingConfig] = {}
    comparisons: list[PriceListConfig] = []
    spool: SpoolConfig = SpoolConfig()

    def free_neurons_of(self, account_id: str) -> int:
        """Neurons a UTC day that cost the account nothing."""
        own = self.accounts.get(account_id)
        if own is None or own.free_neurons_per_day is None:
            return self.free_neurons_per_day
        return own.free_neurons_per_day

    def database_url_in(self, data_dir: Path) -> str:
        """The URL to open: the configured one, or a SQLite file in ``data_dir``."""
        return self.database_url or f"sqlite:///{(data_dir / 'ledger.db').absolute()}"
