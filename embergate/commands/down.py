"""``embergate down``"""

from __future__ import annotations

import click

from embergate.commands.context import with_settings
from embergate.config_file import Settings
from embergate.launch import take_down
from embergate.terminal import say


@click.command()
@with_settings
def down(settings: Settings) -> None:
    """Stop what runs, in order: the gateway drains first, then the replicas."""
    say("Stopped." if take_down(settings, say) else "Nothing is running.")
