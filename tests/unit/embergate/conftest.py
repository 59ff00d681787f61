"""A data directory and a configuration of its own for each test of the command line."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from tests.support.ports import free_port, free_port_run

MODEL = "@cf/huggingface/smollm2-135m-instruct"


class CommandLine:
    """Runs ``embergate`` as a person would, in a directory with a ``config.yaml``."""

    def __init__(self, home: Path) -> None:
        self.home = home
        self.data_dir = home / "data"
        (home / "config.yaml").write_text(
            f"data_dir: data\nmodels: [{{id: '{MODEL}'}}]\n"
            f"gateway: {{port: {free_port()}}}\nreplicas: {{base_port: {free_port_run(2)}}}\n"
            f"billing: {{rate_cards: [{{model: '{MODEL}', effective_from: 2020-01-01, "
            "input: '0.05', cached_input: '0.01', output: '0.20'}]}\n"
        )

    def run(self, *arguments: str, stdin: str = "") -> subprocess.CompletedProcess[str]:
        return subprocess.run(
            [sys.executable, "-m", "embergate", *arguments],
            cwd=self.home,
            input=stdin,
            capture_output=True,
            text=True,
            timeout=60,
            check=False,
            env={"PATH": "/usr/bin:/bin", "PYTHONPATH": str(Path(__file__).parents[3])},
        )


@pytest.fixture
def command_line(tmp_path: Path) -> CommandLine:
    return CommandLine(tmp_path)
