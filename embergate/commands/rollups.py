"""``embergate rollups``"""

from __future__ import annotations

import click

from billing.rollups import find_drift
from embergate.commands.books import open_store
from embergate.commands.context import with_settings
from embergate.config_file import Settings
from embergate.terminal import say


@click.group()
def rollups() -> None:
    """Check or rebuild the sums that reports read."""


@rollups.command()
@with_settings
def rebuild(settings: Settings) -> None:
    """Count every usage record again. A running gateway posts nothing meanwhile; its records wait."""
    with open_store(settings) as store:
        num_records = store.rebuild_rollups()
    say(f"Counted {num_records:,} usage records.")


@rollups.command()
@with_settings
@click.pass_context
def check(context: click.Context, settings: Settings) -> None:
    """Compare the sums with the usage records; the exit code is 1 when they differ."""
    with open_store(settings) as store, store.reading() as connection:
        drift = find_drift(connection)
    for line in drift:
        say(line)
    say("The sums agree with the records." if not drift else "Run `embergate rollups rebuild`.")
    context.exit(1 if drift else 0)
