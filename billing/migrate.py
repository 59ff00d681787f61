"""Brings a database's schema up to date with alembic. Apart, because alembic takes a while to import."""

from __future__ import annotations

from alembic import command
from alembic.config import Config
from alembic.script import ScriptDirectory
from sqlalchemy import Connection


def migrations_config() -> Config:
    """Alembic's view of the migrations in this package; needs no ini file."""
    config = Config()
    config.set_main_option("script_location", "billing:migrations")
    return config


def upgrade(connection: Connection) -> None:
    """Run what is missing within the connection's transaction."""
    config = migrations_config()
    config.attributes["connection"] = connection
    command.upgrade(config, "head")


def known_revisions() -> list[str]:
    """All revisions of this version of the program, newest first."""
    return [script.revision for script in ScriptDirectory.from_config(migrations_config()).walk_revisions()]
