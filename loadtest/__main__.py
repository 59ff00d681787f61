"""``python -m loadtest COMMAND``"""

from __future__ import annotations

import click

from loadtest.bill_check import bill_check
from loadtest.judges.command import judge
from loadtest.replay.command import replay
from loadtest.soak import soak


@click.group(context_settings={"help_option_names": ["-h", "--help"]})
def main() -> None:
    """Outside views of a running gateway; ``make load`` runs locust beside them."""


for command in (replay, bill_check, soak, judge):
    main.add_command(command)

if __name__ == "__main__":
    main(prog_name="python -m loadtest")
