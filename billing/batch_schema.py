"""The tables of asynchronous batches and files, beside the ledger's.

They share its database so that an item's result, its usage record and its transaction can be written in one
database transaction. What the rows mean is the business of their writer; here is only what they are made of.
"""

from __future__ import annotations

from sqlalchemy import BigInteger, Column, Index, LargeBinary, Table, Text

from billing.schema import metadata


def _text(name: str, *, is_key: bool = False) -> Column[str]:
    return Column(name, Text, primary_key=is_key, nullable=False)


def _number(name: str, *, is_key: bool = False) -> Column[int]:
    return Column(name, BigInteger, primary_key=is_key, nullable=False, autoincrement=False)


def _instant(name: str) -> Column[int | None]:
    return Column(name, BigInteger, nullable=True)


batches = Table(
    "batches",
    metadata,
    _text("id", is_key=True),
    _text("account_id"),
    _text("token_id"),
    _text("form"),
    _text("endpoint"),
    _text("model"),
    _text("status"),
    _number("num_items"),
    _text("input_file_id"),
    _text("output_file_id"),
    _text("error_file_id"),
    _text("metadata"),
    _text("problems"),
    _number("created_at_us"),
    _number("expires_at_us"),
    _instant("started_at_us"),
    _instant("cancelling_at_us"),
    _instant("ended_at_us"),
    Index("batches_by_account", "account_id", "created_at_us"),
    Index("batches_by_status", "status", "created_at_us"),
)

batch_items = Table(
    "batch_items",
    metadata,
    _text("batch_id", is_key=True),
    _number("position", is_key=True),
    _text("reference"),
    _text("state"),
    _text("prefix_group"),
    _number("sort_rank"),
    _number("not_before_us"),
    _number("num_leases"),
    _number("num_failures"),
    _text("lease_owner"),
    _number("lease_expires_at_us"),
    _text("request_id"),
    _number("prompt_tokens"),
    _number("cached_prompt_tokens"),
    _number("completion_tokens"),
    _number("reasoning_tokens"),
    Index("batch_items_by_prefix", "batch_id", "state", "prefix_group", "sort_rank"),
    Index("batch_items_by_lease", "state", "lease_expires_at_us"),
    Index("batch_items_by_owner", "lease_owner"),
)

batch_payloads = Table(
    "batch_payloads",
    metadata,
    _text("batch_id", is_key=True),
    _number("position", is_key=True),
    Column("input", LargeBinary, nullable=False),
    Column("output", LargeBinary, nullable=True),
)

batch_events = Table(
    "batch_events",
    metadata,
    _text("batch_id", is_key=True),
    _number("number", is_key=True),
    _text("type"),
    _number("at_us"),
)

files = Table(
    "files",
    metadata,
    _text("id", is_key=True),
    _text("account_id"),
    _text("purpose"),
    _text("name"),
    _text("batch_id"),
    _number("num_bytes"),
    _number("created_at_us"),
    _number("expires_at_us"),
    Index("files_by_account", "account_id", "created_at_us"),
    Index("files_by_batch", "batch_id"),
)

file_chunks = Table(
    "file_chunks",
    metadata,
    _text("file_id", is_key=True),
    _number("number", is_key=True),
    _number("created_at_us"),
    Column("data", LargeBinary, nullable=False),
    Index("file_chunks_by_age", "created_at_us"),
)
