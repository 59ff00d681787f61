"""Sums by time bucket, session and latency, which reports read instead of every usage record."""

from __future__ import annotations

import sqlalchemy as sa
from alembic import op

revision = "0002"
down_revision = "0001"
branch_labels = None
depends_on = None

_SUMS = (
    "num_requests",
    "num_estimated",
    "prompt_tokens",
    "cached_prompt_tokens",
    "completion_tokens",
    "reasoning_tokens",
    "input_nanos",
    "cached_input_nanos",
    "output_nanos",
    "amount_nanos",
    "undiscounted_nanos",
    "neurons_e4",
    "duration_us",
)


def upgrade() -> None:
    """Creates the tables empty; the store fills them when records are there already."""
    _create_rollup("rollup_quarters")
    _create_rollup("rollup_days")
    _create_rollup("rollup_sessions", "session")
    _create_latency_rollup("latency_quarters")
    _create_latency_rollup("latency_days")


def _key(name: str, kind: type[sa.Text | sa.BigInteger | sa.Integer] = sa.Text) -> sa.Column[str | int]:
    return sa.Column(name, kind, primary_key=True, nullable=False, autoincrement=False)


def _create_rollup(name: str, *extra_keys: str) -> None:
    op.create_table(
        name,
        _key("account_id"),
        _key("start_us", sa.BigInteger),
        *(_key(key) for key in (*extra_keys, "model", "token_id", "surface", "status")),
        *(sa.Column(sum_name, sa.BigInteger, nullable=False) for sum_name in _SUMS),
        sqlite_with_rowid=False,
    )
    op.create_index(f"{name}_by_time", name, ["start_us"])


def _create_latency_rollup(name: str) -> None:
    op.create_table(
        name,
        _key("account_id"),
        _key("start_us", sa.BigInteger),
        *(_key(key) for key in ("model", "token_id", "metric")),
        _key("bucket", sa.Integer),
        sa.Column("num_requests", sa.BigInteger, nullable=False),
        sqlite_with_rowid=False,
    )
    op.create_index(f"{name}_by_time", name, ["start_us"])
