"""The tables of prepaid credit and credit notes, of budgets, and of the keys that receipts are signed with.

``credits`` is append-only like the ledger: one row for each transaction that no request made. A budget may be
set, changed and removed; what it limits is read from the ledger.
"""

from __future__ import annotations

from sqlalchemy import BigInteger, Column, Index, LargeBinary, Table, Text

from billing.schema import metadata


def _text(name: str, *, is_key: bool = False) -> Column[str]:
    return Column(name, Text, primary_key=is_key, nullable=False)


def _number(name: str, *, is_key: bool = False) -> Column[int]:
    return Column(name, BigInteger, primary_key=is_key, nullable=False, autoincrement=False)


credits_table = Table(
    "credits",
    metadata,
    _text("transaction_id", is_key=True),
    _text("account_id"),
    _text("kind"),
    _number("amount_nanos"),
    _text("reason"),
    _text("request_id"),
    _number("occurred_at_us"),
    Index("credits_by_account", "account_id", "occurred_at_us"),
    Index("credits_by_request", "request_id"),
)

budgets = Table(
    "budgets",
    metadata,
    _text("id", is_key=True),
    _text("account_id"),
    _text("token_id"),
    _text("period"),
    _text("action"),
    _number("limit_nanos"),
    _number("since_us"),
    _number("created_at_us"),
    Index("budgets_by_scope", "account_id", "token_id", "period", unique=True),
)

budget_leases = Table(
    "budget_leases",
    metadata,
    _text("budget_id", is_key=True),
    _number("window_start_us", is_key=True),
    _text("gateway_id", is_key=True),
    _number("held_nanos"),
    _number("expires_at_us"),
)

receipt_keys = Table(
    "receipt_keys",
    metadata,
    _text("id", is_key=True),
    Column("public_key", LargeBinary(32), nullable=False),
    _number("created_at_us"),
)
