"""A data directory and a configuration of its own for each test of the command line."""

from __future__ import annotations

import contextlib
import io
import sys
from pathlib import Path
from typing import NamedTuple

import pytest

from embergate.__main__ import main
from tests.support.ports import free_port, free_port_run

MODEL = "@cf/huggingface/smollm2-135m-instruct"


class Done(NamedTuple):
    """How a command ended."""

    returncode: int
    stdout: str
    stderr: str


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

    def run(self, *arguments: str, stdin: str = "") -> Done:
        """Run it in this process, with everything that it reads and writes replaced."""
        stdout, stderr = io.StringIO(), io.StringIO()
        with pytest.MonkeyPatch.context() as patch:
            patch.chdir(self.home)
            patch.setattr(sys, "argv", ["embergate", *arguments])
            patch.setattr(sys, "stdin", io.StringIO(stdin))
            patch.delenv("EMBERGATE_CONFIG", raising=False)
            patch.delenv("EMBERGATE_DATA_DIR", raising=False)
            with (
                contextlib.redirect_stdout(stdout),
                contextlib.redirect_stderr(stderr),
                pytest.raises(SystemExit) as ended,
            ):
                main()
        assert isinstance(ended.value.code, int)
        return Done(ended.value.code, stdout.getvalue(), stderr.getvalue())


@pytest.fixture
def command_line(tmp_path: Path) -> CommandLine:
    return CommandLine(tmp_path)
