"""Usage records, the ledger, accounts and API tokens."""

from __future__ import annotations

import sqlalchemy as sa
from alembic import op

from billing.dialect import dialect_named

revision = "0001"
down_revision = None
branch_labels = None
depends_on = None


def upgrade() -> None:
    _create_usage_records()
    _create_ledger()
    _create_accounts()
    dialect = dialect_named(op.get_bind().dialect.name)
    for table in ("usage_records", "ledger_transactions", "ledger_entries"):
        for statement in dialect.append_only(table):
            op.execute(statement)


def _create_usage_records() -> None:
    op.create_table(
        "usage_records",
        sa.Column("request_id", sa.Text, primary_key=True, nullable=False),
        *(
            sa.Column(name, sa.Text, nullable=False)
            for name in (
                "account_id",
                "token_id",
                "model",
                "requested_model",
                "surface",
                "replica_id",
                "session",
            )
        ),
        sa.Column("started_at_us", sa.BigInteger, nullable=False),
        sa.Column("finished_at_us", sa.BigInteger, nullable=False),
        sa.Column("prompt_tokens", sa.BigInteger, nullable=False),
        sa.Column("cached_prompt_tokens", sa.BigInteger, nullable=False),
        sa.Column("completion_tokens", sa.BigInteger, nullable=False),
        sa.Column("reasoning_tokens", sa.BigInteger, nullable=False),
        sa.Column("status", sa.Text, nullable=False),
        sa.Column("is_estimated", sa.Boolean, nullable=False),
        sa.Column("ttft_us", sa.BigInteger, nullable=False),
        sa.Column("num_attempts", sa.BigInteger, nullable=False),
        sqlite_with_rowid=False,
    )
    op.create_index("usage_records_by_account", "usage_records", ["account_id", "started_at_us"])


def _create_ledger() -> None:
    op.create_table(
        "ledger_transactions",
        sa.Column("id", sa.Text, primary_key=True, nullable=False),
        sa.Column("kind", sa.Text, nullable=False),
        *(
            sa.Column(name, sa.BigInteger, nullable=False)
            for name in (
                "occurred_at_us",
                "posted_at_us",
                "input_nanos",
                "cached_input_nanos",
                "output_nanos",
                "amount_nanos",
                "undiscounted_nanos",
                "neurons_e4",
            )
        ),
        sa.Column("rate_card_version", sa.Text, nullable=False),
        sqlite_with_rowid=False,
    )
    op.create_table(
        "ledger_entries",
        sa.Column("transaction_id", sa.Text, primary_key=True, nullable=False),
        sa.Column("leg", sa.Integer, primary_key=True, nullable=False, autoincrement=False),
        sa.Column("ledger_account", sa.Text, nullable=False),
        sa.Column("amount_nanos", sa.BigInteger, nullable=False),
        sqlite_with_rowid=False,
    )


def _create_accounts() -> None:
    op.create_table(
        "accounts",
        sa.Column("id", sa.Text, primary_key=True, nullable=False),
        sa.Column("name", sa.Text, nullable=False),
        sa.Column("created_at_us", sa.BigInteger, nullable=False),
    )
    op.create_table(
        "api_tokens",
        sa.Column("id", sa.Text, primary_key=True, nullable=False),
        sa.Column("account_id", sa.Text, nullable=False),
        sa.Column("name", sa.Text, nullable=False),
        sa.Column("token_hash", sa.LargeBinary(32), nullable=False),
        sa.Column("permissions", sa.Text, nullable=False),
        sa.Column("created_at_us", sa.BigInteger, nullable=False),
        sa.Column("revoked_at_us", sa.BigInteger, nullable=True),
    )
    op.create_index("api_tokens_by_hash", "api_tokens", ["token_hash"], unique=True)
    op.create_index("api_tokens_by_account", "api_tokens", ["account_id"])
