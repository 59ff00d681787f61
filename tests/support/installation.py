"""A whole installation of its own: configuration, data directory, processes; the prepared model is shared."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import psutil
import yaml

from embergate.dev_account import DevAccount, read_dev_env
from embergate.layout import DataLayout
from embergate.run_state import ProcessState, RunState, StateFile
from tests.support.ports import free_port, free_port_run

ROOT = Path(__file__).parents[2]
MODEL = "@cf/huggingface/smollm2-135m-instruct"
ALIAS = "@cf/moonshotai/kimi-k2.5"
EMBEDDINGS = "@cf/sentence-transformers/all-minilm-l6-v2"
ACCOUNT_ID = "e2e0" * 8


def prepared_models() -> Path:
    """The directory of prepared models that ``make model`` fills.

    Raises:
        AssertionError: when it is empty; ``make test`` prepares it first.
    """
    data_dir = Path(os.environ.get("EMBERGATE_DATA_DIR", ROOT / ".embergate"))
    layout = DataLayout(data_dir.resolve())
    assert layout.embedded_checkpoint("kimi").is_dir(), "the embedded model is not prepared: run `make model`"
    return layout.models_dir


class Installation:
    """What ``make up`` makes, in a directory of its own, on free ports."""

    def __init__(self, home: Path, model: str = "", *, num_embedding_replicas: int = 0) -> None:
        """``model``: what the replicas serve; empty for the first of the catalog."""
        self.home = home
        self.data_dir = home / "data"
        self.layout = DataLayout(self.data_dir)
        self.data_dir.mkdir()
        self.layout.models_dir.symlink_to(prepared_models(), target_is_directory=True)
        config = yaml.safe_load((ROOT / "config.yaml").read_text())
        config["data_dir"] = "data"
        config["replicas"]["model"] = model
        config["gateway"]["port"] = free_port()
        config["replicas"]["base_port"] = free_port_run(2)
        config["embeddings"] |= {"count": num_embedding_replicas, "base_port": free_port()}
        config["gateway"]["limits"]["default"] = {
            "requests_per_minute": 100_000,
            "max_concurrent_requests": 1_000,
        }
        config["replicas"]["cache"]["memory_gib"] = 0.75
        for card in config["billing"]["rate_cards"]:
            card["effective_from"] = str(card["effective_from"])
        self.config = config
        self.url = f"http://127.0.0.1:{config['gateway']['port']}"
        (home / "config.yaml").write_text(yaml.safe_dump(config))
        # With a known account id, sessions rank replicas in the same way in every run.
        self.layout.dev_env.write_text(
            f"EMBERGATE_URL={self.url}\nEMBERGATE_ACCOUNT_ID={ACCOUNT_ID}\nEMBERGATE_API_TOKEN=none\n"
        )

    @property
    def environment(self) -> dict[str, str]:
        inherited = {key: value for key, value in os.environ.items() if not key.startswith("EMBERGATE_")}
        return {**inherited, "OMP_NUM_THREADS": "1"}

    def run(
        self, *arguments: str, timeout_s: float = 240.0, stdin: str = ""
    ) -> subprocess.CompletedProcess[str]:
        """Run ``embergate`` in the installation's directory."""
        return subprocess.run(
            [sys.executable, "-m", "embergate", *arguments],
            cwd=self.home,
            env=self.environment,
            input=stdin,
            capture_output=True,
            text=True,
            timeout=timeout_s,
            check=False,
        )

    def run_json(self, *arguments: str) -> Any:
        """Run a command that answers in JSON and must succeed."""
        done = self.run(*arguments, "--json")
        assert done.returncode == 0, done.stderr
        return json.loads(done.stdout)

    def up(self) -> None:
        """Start everything, detached."""
        done = self.run("up", "--detach")
        assert done.returncode == 0, f"{done.stderr}\n{self.last_log_lines()}"

    def down(self) -> None:
        """Stop everything."""
        done = self.run("down")
        assert done.returncode == 0, done.stderr

    @property
    def account(self) -> DevAccount:
        account = read_dev_env(self.layout.dev_env)
        assert account is not None
        return account

    @property
    def state(self) -> RunState | None:
        return StateFile(self.layout.run_dir).read()

    def process(self, name: str) -> ProcessState:
        """The supervised process called ``name``."""
        assert self.state is not None
        return next(process for process in self.state.processes if process.name == name)

    def pid_of(self, name: str) -> int:
        identity = self.process(name).identity
        assert identity is not None
        return identity.pid

    def is_ready(self) -> bool:
        """Whether everything is up."""
        state = self.state
        return state is not None and all(process.status == "ready" for process in state.processes)

    def own_processes(self) -> list[psutil.Process]:
        """Every process on this machine that works in this installation's data directory."""
        return [
            process
            for process in psutil.process_iter(["environ"])
            if (process.info["environ"] or {}).get("EMBERGATE_DATA_DIR") == str(self.data_dir)
        ]

    def last_log_lines(self) -> str:
        """The ends of all logs, for messages of failed tests."""
        return "\n".join(
            f"== {path.name}\n" + "\n".join(path.read_text(errors="replace").splitlines()[-15:])
            for path in sorted(self.layout.logs_dir.glob("*.log"))
        )
