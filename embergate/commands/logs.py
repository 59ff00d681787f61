"""``embergate logs``"""

from __future__ import annotations

import time
from pathlib import Path

import click

from embergate.commands.context import with_settings
from embergate.config_file import Settings
from embergate.layout import DataLayout
from embergate.log_rotation import tail
from embergate.refusal import Refusal

_POLL_INTERVAL_S = 0.3


@click.command()
@click.argument("names", nargs=-1, metavar="[PROCESS]...")
@click.option(
    "-n",
    "--lines",
    "num_lines",
    type=click.IntRange(min=0),
    default=50,
    show_default=True,
    help="Lines of each log.",
)
@click.option("-f", "--follow", "is_following", is_flag=True, help="Go on with what is written from now on.")
@with_settings
def logs(settings: Settings, names: tuple[str, ...], num_lines: int, is_following: bool) -> None:
    """Show what the processes wrote: gateway, replica-0, ..., supervisor."""
    paths = _find_logs(DataLayout(settings.data_dir).logs_dir, names)
    width = max(len(path.stem) for path in paths)
    positions = {path: path.stat().st_size for path in paths}
    for path in paths:
        _print(path, width, tail(path, num_lines))
    while is_following:
        time.sleep(_POLL_INTERVAL_S)
        for path in paths:
            lines, positions[path] = _read_on(path, positions[path])
            _print(path, width, lines)


def _find_logs(directory: Path, names: tuple[str, ...]) -> list[Path]:
    found = {path.stem: path for path in sorted(directory.glob("*.log"))}
    if not found:
        raise Refusal(
            f"there are no logs in {directory} yet: `make up` starts the processes that write them."
        )
    for name in names:
        if name not in found:
            raise Refusal(f"there is no log of {name}: there are {', '.join(found)}.")
    return [found[name] for name in names or found]


def _read_on(path: Path, position: int) -> tuple[list[str], int]:
    """Whole lines written since ``position``, and the new position; a shorter file was rotated."""
    size = path.stat().st_size
    with path.open("rb") as file:
        file.seek(position if position <= size else 0)
        start = file.tell()
        data = file.read(1024 * 1024)
    whole = data[: data.rfind(b"\n") + 1]
    return whole.decode(errors="replace").split("\n")[:-1], start + len(whole)


def _print(path: Path, width: int, lines: list[str]) -> None:
    for line in lines:
        click.echo(f"{path.stem:<{width}} | {line}")
