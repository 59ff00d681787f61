"""How the command line looks: one console for answers, one for what happens meanwhile."""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Iterator, Sequence
from typing import Any

import msgspec
from rich.console import Console
from rich.progress import BarColumn, Progress, TaskProgressColumn, TextColumn, TimeElapsedColumn
from rich.table import Table

from embergate.voice import Voice


def console() -> Console:
    """Where answers go: standard output, never wrapped or coloured when it is not a terminal."""
    return Console(highlight=False, soft_wrap=True)


def say(line: str) -> None:
    """Tell the person at the terminal what is going on, on standard error."""
    Console(stderr=True, highlight=False, soft_wrap=True).print(line, markup=False)


def print_json(value: Any) -> None:
    """Print an answer for programs."""
    sys.stdout.write(msgspec.json.format(msgspec.json.encode(value, order="sorted")).decode() + "\n")


def print_table(columns: Sequence[str], rows: Sequence[Sequence[str]], numeric: Sequence[str] = ()) -> None:
    """Print an answer for people; the columns named in ``numeric`` are aligned to the right."""
    table = Table(box=None, header_style="bold", pad_edge=False)
    for column in columns:
        table.add_column(column, justify="right" if column in numeric else "left", no_wrap=True)
    for row in rows:
        table.add_row(*row)
    output = Console(highlight=False)
    if not output.is_terminal:
        output = Console(highlight=False, width=400)
    output.print(table, markup=False) if rows else output.print("nothing yet")


@contextlib.contextmanager
def voice() -> Iterator[Voice]:
    """A voice with a progress bar, which appears when there is progress and stays when it is done."""
    bar = Progress(
        TextColumn("{task.description}"),
        BarColumn(),
        TaskProgressColumn(),
        TimeElapsedColumn(),
        console=Console(stderr=True, highlight=False),
    )
    task = bar.add_task("", total=1.0, visible=False)

    def advance(share: float, what: str) -> None:
        if not bar.live.is_started:
            bar.start()
        bar.update(task, completed=share, description=what, visible=True)

    def say_beside_it(line: str) -> None:
        bar.console.print(line, markup=False, soft_wrap=True)

    try:
        yield Voice(say=say_beside_it, progress=advance)
    finally:
        if bar.live.is_started:
            bar.stop()  # of one that never started it would print an empty line
