"""Alembic's entry: runs the migrations on the connection, in the transaction, that the store hands in."""

from __future__ import annotations

from alembic import context

from billing import batch_schema, money_schema
from billing.schema import metadata

assert batch_schema.metadata is money_schema.metadata is metadata, "all tables are known"

context.configure(connection=context.config.attributes["connection"], target_metadata=metadata)
context.run_migrations()
