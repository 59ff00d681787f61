"""``embergate status``"""

from __future__ import annotations

import time

import click

from embergate.commands.context import with_settings
from embergate.config_file import Settings
from embergate.layout import DataLayout
from embergate.run_state import ProcessState, RunState, StateFile
from embergate.terminal import print_json, print_table, say

NOT_RUNNING = 3


@click.command()
@click.option("--json", "as_json", is_flag=True, help="Print JSON.")
@with_settings
@click.pass_context
def status(context: click.Context, settings: Settings, as_json: bool) -> None:
    """Show which processes run and how they are.

    The exit code is 0 when all are ready, 1 when one is not, and 3 when nothing runs.
    """
    state = StateFile(DataLayout(settings.data_dir).run_dir).read()
    if state is None or not state.supervisor.is_alive():
        if as_json:
            print_json({"phase": "stopped", "processes": []})
        else:
            say(_last_words(state))
        context.exit(NOT_RUNNING)
    if as_json:
        print_json(state)
    else:
        _print_processes(state)
    context.exit(0 if state.phase == "ready" and all(p.status == "ready" for p in state.processes) else 1)


def _last_words(state: RunState | None) -> str:
    if state is not None and state.message:
        return f"Nothing is running; the last start failed: {state.message}"
    return "Nothing is running: `make up` starts it."


def _print_processes(state: RunState) -> None:
    rows = [
        (
            process.name,
            process.status,
            str(process.identity.pid) if process.identity else "-",
            _age(process),
            str(process.num_restarts),
            process.url,
        )
        for process in state.processes
    ]
    print_table(
        ("process", "status", "pid", "up", "restarts", "url"), rows, numeric=("pid", "up", "restarts")
    )


def _age(process: ProcessState) -> str:
    """How long a process has been running, to two units."""
    if process.identity is None:
        return "-"
    seconds = max(0, int(time.time() - process.identity.started_at))
    minutes, hours = seconds // 60, seconds // 3600
    if hours:
        return f"{hours} h {minutes % 60} min"
    return f"{minutes} min {seconds % 60} s" if minutes else f"{seconds} s"
