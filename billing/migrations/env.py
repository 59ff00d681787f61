"""Alembic's entry: runs the migrations on the connection, in the transaction, that the store hands in."""

from __future__ import annotations

from alembic import context

from billing.batch_schema import metadata  # the same for all tables, of which these are the last

context.configure(connection=context.config.attributes["connection"], target_metadata=metadata)
context.run_migrations()
