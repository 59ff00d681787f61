"""The tables of prepaid credit and credit notes, of budgets, and of the keys that receipts are signed with.

``credits`` is append-only like the ledger: one row for each transaction that no request made. A budget may be
set, changed and removed; what it limits is read from the ledger.
"""

from __future__ import annotations

from sqlalchemy import Column, Index, LargeBinary, Table

from billing.columns import number, text
from billing.schema import metadata

credits_table = Table(
    "credits",
    metadata,
    text("transaction_id", is_key=True),
    text("account_id"),
    text("kind"),
    number("amount_nanos"),
    text("reason"),
    text("request_id"),
    number("occurred_at_us"),
    Index("credits_by_account", "account_id", "occurred_at_us"),
    Index("credits_by_request", "request_id"),
)

budgets = Table(
    "budgets",
    metadata,
    text("id", is_key=True),
    text("account_id"),
    text("token_id"),
    text("period"),
    text("action"),
    number("limit_nanos"),
    number("since_us"),
    number("created_at_us"),
    Index("budgets_by_scope", "account_id", "token_id", "period", unique=True),
)

budget_leases = Table(
    "budget_leases",
    metadata,
    text("budget_id", is_key=True),
    number("window_start_us", is_key=True),
    text("gateway_id", is_key=True),
    number("held_nanos"),
    number("expires_at_us"),
)

receipt_keys = Table(
    "receipt_keys",
    metadata,
    text("id", is_key=True),
    Column("public_key", LargeBinary(32), nullable=False),
    number("created_at_us"),
)
