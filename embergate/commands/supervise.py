"""``embergate supervise``: the detached half of ``up --detach``; not for people."""

from __future__ import annotations

from datetime import UTC, datetime

import click

from embergate.commands.context import with_settings
from embergate.config_file import Settings
from embergate.launch import supervise as run
from embergate.run_state import InstanceLock
from embergate.terminal import say


@click.command(hidden=True)
@click.option("--lock", type=int, required=True, help="Descriptor of the held lock.")
@with_settings
def supervise(settings: Settings, lock: int) -> None:
    """Keep the processes running under an inherited lock."""
    held = InstanceLock.inherit(lock)
    try:
        run(settings, _log, lambda: _log("everything is ready"))
    finally:
        held.release()


def _log(line: str) -> None:
    say(f"{datetime.now(UTC):%Y-%m-%dT%H:%M:%SZ} {line}")
