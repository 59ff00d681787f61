"""The tables. Instants are integer UTC microseconds, money is integer nano-dollars, ids are text.

Rows of the three append-only tables are keyed by the request id and stored in its order, so that ids that
grow with time (``usage.new_request_id``) are written to the end of each table. ``usage_records`` mirrors
``UsageRecord`` field by field; a test holds the two together, and these tables to the migrations.
"""

from __future__ import annotations

from sqlalchemy import BigInteger, Boolean, Column, Index, Integer, LargeBinary, MetaData, Table

from billing.columns import number, text

metadata = MetaData()

HEAD_REVISION = "0005"
"""The newest migration; an up-to-date database is recognised by it without loading the migrations."""


usage_records = Table(
    "usage_records",
    metadata,
    text("request_id", is_key=True),
    text("account_id"),
    text("token_id"),
    text("model"),
    text("requested_model"),
    text("surface"),
    text("replica_id"),
    text("session"),
    number("started_at_us"),
    number("finished_at_us"),
    number("prompt_tokens"),
    number("cached_prompt_tokens"),
    number("completion_tokens"),
    number("reasoning_tokens"),
    text("status"),
    Column("is_estimated", Boolean, nullable=False),
    number("ttft_us"),
    number("num_attempts"),
    number("free_neurons_e4", default="0"),
    number("num_cached_blocks", default="0"),
    text("cache_head", default=""),
    Index("usage_records_by_account", "account_id", "started_at_us"),
    sqlite_with_rowid=False,
)

ledger_transactions = Table(
    "ledger_transactions",
    metadata,
    text("id", is_key=True),
    text("kind"),
    number("occurred_at_us"),
    number("posted_at_us"),
    number("input_nanos"),
    number("cached_input_nanos"),
    number("output_nanos"),
    number("amount_nanos"),
    number("undiscounted_nanos"),
    number("neurons_e4"),
    text("rate_card_version"),
    number("free_nanos", default="0"),
    sqlite_with_rowid=False,
)

ledger_entries = Table(
    "ledger_entries",
    metadata,
    text("transaction_id", is_key=True),
    Column("leg", Integer, primary_key=True, nullable=False, autoincrement=False),
    text("ledger_account"),
    number("amount_nanos"),
    sqlite_with_rowid=False,
)

accounts = Table(
    "accounts",
    metadata,
    text("id", is_key=True),
    text("name"),
    number("created_at_us"),
)

api_tokens = Table(
    "api_tokens",
    metadata,
    text("id", is_key=True),
    text("account_id"),
    text("name"),
    Column("token_hash", LargeBinary(32), nullable=False),
    text("permissions"),
    number("created_at_us"),
    Column("revoked_at_us", BigInteger, nullable=True),
    Index("api_tokens_by_hash", "token_hash", unique=True),
    Index("api_tokens_by_account", "account_id"),
)

sign_outs = Table(
    "sign_outs",
    metadata,
    text("session_id", is_key=True),
    number("expires_at_us"),
)


def _rollup(name: str, *extra_keys: str) -> Table:
    """Sums over the usage records that share all keys; ``start_us`` is the start of their time bucket."""
    return Table(
        name,
        metadata,
        text("account_id", is_key=True),
        Column("start_us", BigInteger, primary_key=True, nullable=False, autoincrement=False),
        *(text(key, is_key=True) for key in (*extra_keys, "model", "token_id", "surface", "status")),
        *(
            number(sum_name)
            for sum_name in (
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
        ),
        Index(f"{name}_by_time", "start_us"),
        sqlite_with_rowid=False,
    )


rollup_quarters = _rollup("rollup_quarters")
rollup_days = _rollup("rollup_days")
rollup_sessions = _rollup("rollup_sessions", "session")


def _latency_rollup(name: str) -> Table:
    """How many requests had a latency in each bucket of ``billing.latency``'s scale."""
    return Table(
        name,
        metadata,
        text("account_id", is_key=True),
        Column("start_us", BigInteger, primary_key=True, nullable=False, autoincrement=False),
        text("model", is_key=True),
        text("token_id", is_key=True),
        text("metric", is_key=True),
        Column("bucket", Integer, primary_key=True, nullable=False, autoincrement=False),
        number("num_requests"),
        Index(f"{name}_by_time", "start_us"),
        sqlite_with_rowid=False,
    )


latency_quarters = _latency_rollup("latency_quarters")
latency_days = _latency_rollup("latency_days")

APPEND_ONLY = ("usage_records", "ledger_transactions", "ledger_entries")
