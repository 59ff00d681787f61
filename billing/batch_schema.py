"""The tables of asynchronous batches and files, beside the ledger's.

They share its database so that an item's result, its usage record and its transaction can be written in one
database transaction. What the rows mean is the business of their writer; here is only what they are made of.
"""

from __future__ import annotations

from sqlalchemy import Column, Index, LargeBinary, Table

from billing.columns import instant, number, text
from billing.schema import metadata

batches = Table(
    "batches",
    metadata,
    text("id", is_key=True),
    text("account_id"),
    text("token_id"),
    text("form"),
    text("endpoint"),
    text("model"),
    text("status"),
    number("num_items"),
    text("input_file_id"),
    text("output_file_id"),
    text("error_file_id"),
    text("metadata"),
    text("problems"),
    number("created_at_us"),
    number("expires_at_us"),
    instant("started_at_us"),
    instant("cancelling_at_us"),
    instant("ended_at_us"),
    Index("batches_by_account", "account_id", "created_at_us"),
    Index("batches_by_status", "status", "created_at_us"),
)

batch_items = Table(
    "batch_items",
    metadata,
    text("batch_id", is_key=True),
    number("position", is_key=True),
    text("reference"),
    text("state"),
    text("prefix_group"),
    number("sort_rank"),
    number("not_before_us"),
    number("num_leases"),
    number("num_failures"),
    text("lease_owner"),
    number("lease_expires_at_us"),
    text("request_id"),
    number("prompt_tokens"),
    number("cached_prompt_tokens"),
    number("completion_tokens"),
    number("reasoning_tokens"),
    Index("batch_items_by_prefix", "batch_id", "state", "prefix_group", "sort_rank"),
    Index("batch_items_by_lease", "state", "lease_expires_at_us"),
    Index("batch_items_by_owner", "lease_owner"),
)

batch_payloads = Table(
    "batch_payloads",
    metadata,
    text("batch_id", is_key=True),
    number("position", is_key=True),
    Column("input", LargeBinary, nullable=False),
    Column("output", LargeBinary, nullable=True),
)

batch_events = Table(
    "batch_events",
    metadata,
    text("batch_id", is_key=True),
    number("number", is_key=True),
    text("type"),
    number("at_us"),
)

files = Table(
    "files",
    metadata,
    text("id", is_key=True),
    text("account_id"),
    text("purpose"),
    text("name"),
    text("batch_id"),
    number("num_bytes"),
    number("created_at_us"),
    number("expires_at_us"),
    Index("files_by_account", "account_id", "created_at_us"),
    Index("files_by_batch", "batch_id"),
)

file_chunks = Table(
    "file_chunks",
    metadata,
    text("file_id", is_key=True),
    number("number", is_key=True),
    number("created_at_us"),
    Column("data", LargeBinary, nullable=False),
    Index("file_chunks_by_age", "created_at_us"),
)
