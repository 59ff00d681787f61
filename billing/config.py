"""Configuration of the counting house. Prices are decimal strings in US dollars, so that no float touches money."""

from __future__ import annotations

import msgspec


class _Section(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """A configuration section: immutable, and a typo in a key is an error."""


class RateCardConfig(_Section):
    """Prices of one model from ``effective_from`` (a UTC date, inclusive) on, in dollars per million tokens.

    ``cached_input`` null means that cached tokens cost as much as other input, never nothing.
    """

    model: str
    effective_from: str
    input: str
    output: str
    cached_input: str | None = None


class SpoolConfig(_Section):
    """The durable journal in front of the store."""

    max_segment_bytes: int = 16 * 1024 * 1024
    max_unposted_records: int = 1_000_000
    post_interval_s: float = 0.05
    max_post_batch: int = 2_000


class BillingConfig(_Section):
    """``database_url`` empty means SQLite in the data directory."""

    database_url: str = ""
    currency: str = "USD"
    usd_per_thousand_neurons: str = "0.011"
    rate_cards: list[RateCardConfig] = []
    spool: SpoolConfig = SpoolConfig()
