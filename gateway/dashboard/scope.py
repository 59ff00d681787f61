"""What a page is about: whose usage, when, and of what, as its address says."""

from __future__ import annotations

from collections.abc import Mapping
from urllib.parse import urlencode

import msgspec

from billing.accounts import OPERATOR_PERMISSION, Principal
from billing.analytics import WIDTHS_US, Dimension, UsageFilter
from billing.periods import MICROS_PER_DAY, Period, instant_text
from billing.usage import STATUSES

RANGES: Mapping[str, tuple[str, int, Dimension]] = {
    "24h": ("24 hours", MICROS_PER_DAY, "hour"),
    "7d": ("7 days", 7 * MICROS_PER_DAY, "day"),
    "30d": ("30 days", 30 * MICROS_PER_DAY, "day"),
    "90d": ("90 days", 90 * MICROS_PER_DAY, "day"),
    "365d": ("a year", 365 * MICROS_PER_DAY, "day"),
}
"""Name in the address -> in words, length, and the time buckets of its charts."""
DEFAULT_RANGE = "7d"
_FILTERS = ("model", "token", "session", "status")
_MAX_CHARS = 300


class Scope(msgspec.Struct, frozen=True, kw_only=True):
    """``account_id`` None means all accounts, for operators only."""

    principal: Principal
    account_id: str | None
    range_name: str
    filters: dict[str, str]
    now_us: int

    @property
    def is_operator(self) -> bool:
        return OPERATOR_PERMISSION in self.principal.permissions

    @property
    def grain(self) -> Dimension:
        """The time buckets of charts."""
        return RANGES[self.range_name][2]

    @property
    def starts_us(self) -> range:
        """The start of every time bucket, the present one last."""
        width_us = WIDTHS_US[self.grain]
        last_us = self.now_us - self.now_us % width_us
        num = RANGES[self.range_name][1] // width_us
        return range(last_us - (num - 1) * width_us, last_us + 1, width_us)

    @property
    def wanted(self) -> UsageFilter:
        """The same for the counting house."""
        model, token, session, status = (
            (self.filters[name],) if self.filters[name] else () for name in _FILTERS
        )
        return UsageFilter(
            account_id=self.account_id,
            period=Period(self.starts_us[0], None),
            models=model,
            token_ids=token,
            sessions=session,
            statuses=status,
        )

    @property
    def since(self) -> str:
        """Where the period begins, ISO 8601."""
        return instant_text(self.starts_us[0])

    def query(self, **changes: str) -> str:
        """The query string of a page about the same, with changes; "" leaves a parameter out."""
        values = {"range": self.range_name, **self.filters}
        if self.is_operator:
            values["account"] = self.account_id or "all"
        shown = {name: value for name, value in (values | changes).items() if value}
        return f"?{urlencode(shown)}"


def scope_of(principal: Principal, query: Mapping[str, str], now_us: int) -> Scope:
    """What an address means for ``principal``; values that make no sense count as not there."""
    account_id: str | None = principal.account_id
    if OPERATOR_PERMISSION in principal.permissions:
        asked = query.get("account", "all")
        account_id = None if asked in ("", "all") else asked[:_MAX_CHARS]
    filters = {name: _clean(query.get(name, "")) for name in _FILTERS}
    if filters["status"] not in STATUSES:
        filters["status"] = ""
    range_name = query.get("range", DEFAULT_RANGE)
    return Scope(
        principal=principal,
        account_id=account_id,
        range_name=range_name if range_name in RANGES else DEFAULT_RANGE,
        filters=filters,
        now_us=now_us,
    )


def _clean(text: str) -> str:
    return text[:_MAX_CHARS].replace("\x00", "")
