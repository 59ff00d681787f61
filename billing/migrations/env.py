"""Alembic's entry: runs the migrations on the connection, in the transaction, that the store hands in."""

from __future__ import annotations

from alembic import context

import billing.batch_schema
import billing.money_schema  # noqa: F401 - they add their tables to the metadata
from billing.schema import metadata

context.configure(connection=context.config.attributes["connection"], target_metadata=metadata)
context.run_migrations()
