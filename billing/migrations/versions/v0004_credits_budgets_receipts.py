"""What records say of free allocations and cached blocks; credits, budgets and receipt keys."""

from __future__ import annotations

import sqlalchemy as sa
from alembic import op

from billing.dialect import dialect_named

revision = "0004"
down_revision = "0003"
branch_labels = None
depends_on = None


def upgrade() -> None:
    for name in ("free_neurons_e4", "num_cached_blocks"):
        op.add_column("usage_records", sa.Column(name, sa.BigInteger, nullable=False, server_default="0"))
    op.add_column("usage_records", sa.Column("cache_head", sa.Text, nullable=False, server_default=""))
    op.add_column(
        "ledger_transactions", sa.Column("free_nanos", sa.BigInteger, nullable=False, server_default="0")
    )
    _create_credits()
    _create_budgets()
    op.create_table(
        "receipt_keys",
        _key("id"),
        sa.Column("public_key", sa.LargeBinary(32), nullable=False),
        *_numbers("created_at_us"),
    )


def _create_credits() -> None:
    op.create_table(
        "credits",
        _key("transaction_id"),
        *_texts("account_id", "kind"),
        *_numbers("amount_nanos"),
        *_texts("reason", "request_id"),
        *_numbers("occurred_at_us"),
    )
    op.create_index("credits_by_account", "credits", ["account_id", "occurred_at_us"])
    op.create_index("credits_by_request", "credits", ["request_id"])
    for statement in dialect_named(op.get_bind().dialect.name).append_only("credits"):
        op.execute(statement)


def _create_budgets() -> None:
    op.create_table(
        "budgets",
        _key("id"),
        *_texts("account_id", "token_id", "period", "action"),
        *_numbers("limit_nanos", "since_us", "created_at_us"),
    )
    op.create_index("budgets_by_scope", "budgets", ["account_id", "token_id", "period"], unique=True)
    op.create_table(
        "budget_leases",
        _key("budget_id"),
        sa.Column("window_start_us", sa.BigInteger, primary_key=True, nullable=False, autoincrement=False),
        _key("gateway_id"),
        *_numbers("held_nanos", "expires_at_us"),
    )


def _key(name: str) -> sa.Column[str]:
    return sa.Column(name, sa.Text, primary_key=True, nullable=False)


def _texts(*names: str) -> list[sa.Column[str]]:
    return [sa.Column(name, sa.Text, nullable=False) for name in names]


def _numbers(*names: str) -> list[sa.Column[int]]:
    return [sa.Column(name, sa.BigInteger, nullable=False) for name in names]
