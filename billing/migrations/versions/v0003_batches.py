"""Asynchronous batches, their items and events, and files."""

from __future__ import annotations

import sqlalchemy as sa
from alembic import op

revision = "0003"
down_revision = "0002"
branch_labels = None
depends_on = None


def upgrade() -> None:
    _create_batches()
    _create_items()
    _create_files()


def _texts(*names: str) -> list[sa.Column[str]]:
    return [sa.Column(name, sa.Text, nullable=False) for name in names]


def _numbers(*names: str) -> list[sa.Column[int]]:
    return [sa.Column(name, sa.BigInteger, nullable=False) for name in names]


def _item_key(of: str, number: str) -> tuple[sa.Column[str], sa.Column[int]]:
    return (
        sa.Column(of, sa.Text, primary_key=True, nullable=False),
        sa.Column(number, sa.BigInteger, primary_key=True, nullable=False, autoincrement=False),
    )


def _create_batches() -> None:
    op.create_table(
        "batches",
        sa.Column("id", sa.Text, primary_key=True, nullable=False),
        *_texts("account_id", "token_id", "form", "endpoint", "model", "status"),
        *_numbers("num_items"),
        *_texts("input_file_id", "output_file_id", "error_file_id", "metadata", "problems"),
        *_numbers("created_at_us", "expires_at_us"),
        *(
            sa.Column(name, sa.BigInteger, nullable=True)
            for name in ("started_at_us", "cancelling_at_us", "ended_at_us")
        ),
    )
    op.create_index("batches_by_account", "batches", ["account_id", "created_at_us"])
    op.create_index("batches_by_status", "batches", ["status", "created_at_us"])
    op.create_table("batch_events", *_item_key("batch_id", "number"), *_texts("type"), *_numbers("at_us"))


def _create_items() -> None:
    op.create_table(
        "batch_items",
        *_item_key("batch_id", "position"),
        *_texts("reference", "state", "prefix_group"),
        *_numbers("sort_rank", "not_before_us", "num_leases", "num_failures"),
        *_texts("lease_owner"),
        *_numbers("lease_expires_at_us"),
        *_texts("request_id"),
        *_numbers("prompt_tokens", "cached_prompt_tokens", "completion_tokens", "reasoning_tokens"),
    )
    op.create_index(
        "batch_items_by_prefix", "batch_items", ["batch_id", "state", "prefix_group", "sort_rank"]
    )
    op.create_index("batch_items_by_lease", "batch_items", ["state", "lease_expires_at_us"])
    op.create_index("batch_items_by_owner", "batch_items", ["lease_owner"])
    op.create_table(
        "batch_payloads",
        *_item_key("batch_id", "position"),
        sa.Column("input", sa.LargeBinary, nullable=False),
        sa.Column("output", sa.LargeBinary, nullable=True),
    )


def _create_files() -> None:
    op.create_table(
        "files",
        sa.Column("id", sa.Text, primary_key=True, nullable=False),
        *_texts("account_id", "purpose", "name", "batch_id"),
        *_numbers("num_bytes", "created_at_us", "expires_at_us"),
    )
    op.create_index("files_by_account", "files", ["account_id", "created_at_us"])
    op.create_index("files_by_batch", "files", ["batch_id"])
    op.create_table(
        "file_chunks",
        *_item_key("file_id", "number"),
        *_numbers("created_at_us"),
        sa.Column("data", sa.LargeBinary, nullable=False),
    )
    op.create_index("file_chunks_by_age", "file_chunks", ["created_at_us"])
