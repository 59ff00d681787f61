"""The tables. Instants are integer UTC microseconds, money is integer nano-dollars, ids are text.

Rows of the three append-only tables are keyed by the request id and stored in its order, so that ids that
grow with time (``usage.new_request_id``) are written to the end of each table. ``usage_records`` mirrors
``UsageRecord`` field by field; a test holds the two together, and these tables to the migrations.
"""

from __future__ import annotations

from sqlalchemy import BigInteger, Boolean, Column, Index, Integer, LargeBinary, MetaData, Table, Text

metadata = MetaData()

HEAD_REVISION = "0005"
"""The newest migration; an up-to-date database is recognised by it without loading the migrations."""


def _text(name: str, *, is_key: bool = False, default: str | None = None) -> Column[str]:
    return Column(name, Text, primary_key=is_key, nullable=False, server_default=default)


def _count(name: str, *, default: str | None = None) -> Column[int]:
    return Column(name, BigInteger, nullable=False, server_default=default)


usage_records = Table(
    "usage_records",
    metadata,
    _text("request_id", is_key=True),
    _text("account_id"),
    _text("token_id"),
    _text("model"),
    _text("requested_model"),
    _text("surface"),
    _text("replica_id"),
    _text("session"),
    _count("started_at_us"),
    _count("finished_at_us"),
    _count("prompt_tokens"),
    _count("cached_prompt_tokens"),
    _count("completion_tokens"),
    _count("reasoning_tokens"),
    _text("status"),
    Column("is_estimated", Boolean, nullable=False),
    _count("ttft_us"),
    _count("num_attempts"),
    _count("free_neurons_e4", default="0"),
    _count("num_cached_blocks", default="0"),
    _text("cache_head", default=""),
    Index("usage_records_by_account", "account_id", "started_at_us"),
    sqlite_with_rowid=False,
)

ledger_transactions = Table(
    "ledger_transactions",
    metadata,
    _text("id", is_key=True),
    _text("kind"),
    _count("occurred_at_us"),
    _count("posted_at_us"),
    _count("input_nanos"),
    _count("cached_input_nanos"),
    _count("output_nanos"),
    _count("amount_nanos"),
    _count("undiscounted_nanos"),
    _count("neurons_e4"),
    _text("rate_card_version"),
    _count("free_nanos", default="0"),
    sqlite_with_rowid=False,
)

ledger_entries = Table(
    "ledger_entries",
    metadata,
    _text("transaction_id", is_key=True),
    Column("leg", Integer, primary_key=True, nullable=False, autoincrement=False),
    _text("ledger_account"),
    _count("amount_nanos"),
    sqlite_with_rowid=False,
)

accounts = Table(
    "accounts",
    metadata,
    _text("id", is_key=True),
    _text("name"),
    _count("created_at_us"),
)

api_tokens = Table(
    "api_tokens",
    metadata,
    _text("id", is_key=True),
    _text("account_id"),
    _text("name"),
    Column("token_hash", LargeBinary(32), nullable=False),
    _text("permissions"),
    _count("created_at_us"),
    Column("revoked_at_us", BigInteger, nullable=True),
    Index("api_tokens_by_hash", "token_hash", unique=True),
    Index("api_tokens_by_account", "account_id"),
)

sign_outs = Table(
    "sign_outs",
    metadata,
    _text("session_id", is_key=True),
    _count("expires_at_us"),
)


def _rollup(name: str, *extra_keys: str) -> Table:
    """Sums over the usage records that share all keys; ``start_us`` is the start of their time bucket."""
    return Table(
        name,
        metadata,
        _text("account_id", is_key=True),
        Column("start_us", BigInteger, primary_key=True, nullable=False, autoincrement=False),
        *(_text(key, is_key=True) for key in (*extra_keys, "model", "token_id", "surface", "status")),
        *(
            _count(sum_name)
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
        _text("account_id", is_key=True),
        Column("start_us", BigInteger, primary_key=True, nullable=False, autoincrement=False),
        _text("model", is_key=True),
        _text("token_id", is_key=True),
        _text("metric", is_key=True),
        Column("bucket", Integer, primary_key=True, nullable=False, autoincrement=False),
        _count("num_requests"),
        Index(f"{name}_by_time", "start_us"),
        sqlite_with_rowid=False,
    )


latency_quarters = _latency_rollup("latency_quarters")
latency_days = _latency_rollup("latency_days")

APPEND_ONLY = ("usage_records", "ledger_transactions", "ledger_entries")
