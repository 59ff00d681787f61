"""A gateway of one's own with the tiny Kimi behind it, started and stopped by its command line."""

from __future__ import annotations

import contextlib
import os
import socket
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import yaml

TINY = "kimi-k2.5-tiny"
_TIMEOUT_S = 900


@dataclass(frozen=True)
class Target:
    """Where to ask. ``url`` ends where ``/chat/completions`` begins."""

    url: str
    token: str
    model: str


class StartError(RuntimeError):
    """The gateway did not come up; the message says why."""


@contextlib.contextmanager
def tiny_gateway(config: Path) -> Iterator[Target]:
    """Serve the tiny Kimi on free ports, from a data directory that is thrown away.

    Args:
        config: the installation's; its prepared models are used.

    Raises:
        StartError: it does not come up.
    """
    with tempfile.TemporaryDirectory(prefix="verify-kimi-") as home:
        directory = Path(home)
        data = directory / "data"
        data.mkdir()
        models = _data_dir(config) / "models"
        models.mkdir(parents=True, exist_ok=True)
        (data / "models").symlink_to(models.resolve(), target_is_directory=True)
        (directory / "config.yaml").write_text(yaml.safe_dump(_changed(yaml.safe_load(config.read_text()))))
        try:
            _run(directory, "up", "--detach")
            yield _target(data / "dev.env")
        finally:
            subprocess.run(
                _command("down"), cwd=directory, env=_environment(), capture_output=True, check=False
            )


def _data_dir(config: Path) -> Path:
    named = os.environ.get("EMBERGATE_DATA_DIR")
    if named:
        return Path(named)
    return config.parent / str(yaml.safe_load(config.read_text()).get("data_dir", ".embergate"))


def _changed(config: dict[str, object]) -> dict[str, object]:
    """The installation's configuration with one tiny replica, ports of its own and room for many requests."""
    gateway, replicas = dict(_section(config, "gateway")), dict(_section(config, "replicas"))
    gateway["port"] = _free_port()
    limits = dict(_section(gateway, "limits"))
    limits["default"] = {"requests_per_minute": 100_000, "max_concurrent_requests": 256}
    gateway["limits"] = limits
    replicas |= {"count": 1, "base_port": _free_port(), "model": TINY}
    replicas["cache"] = {**_section(replicas, "cache"), "memory_gib": 0.5}
    changed = {**config, "data_dir": "data", "gateway": gateway, "replicas": replicas}
    if "embeddings" in config:
        changed["embeddings"] = {**_section(config, "embeddings"), "count": 0}
    for card in _section(config, "billing").get("rate_cards", []):  # type: ignore[attr-defined]
        card["effective_from"] = str(card["effective_from"])
    return changed


def _section(config: dict[str, object], name: str) -> dict[str, object]:
    section = config.get(name) or {}
    assert isinstance(section, dict)
    return section


def _target(dev_env: Path) -> Target:
    values = dict(line.split("=", 1) for line in dev_env.read_text().splitlines() if "=" in line)
    account = values["EMBERGATE_ACCOUNT_ID"]
    url = f"{values['EMBERGATE_URL']}/client/v4/accounts/{account}/ai/v1"
    return Target(url, values["EMBERGATE_API_TOKEN"], TINY)


def _run(directory: Path, *arguments: str) -> None:
    done = subprocess.run(
        _command(*arguments), cwd=directory, env=_environment(), capture_output=True, text=True,
        timeout=_TIMEOUT_S, check=False,
    )  # fmt: skip
    if done.returncode:
        raise StartError(done.stderr.strip()[-1000:] or f"embergate {arguments[0]} failed")


def _command(*arguments: str) -> list[str]:
    return [sys.executable, "-m", "embergate", *arguments]


def _environment() -> dict[str, str]:
    return {key: value for key, value in os.environ.items() if not key.startswith("EMBERGATE_")}


def _free_port() -> int:
    with socket.create_server(("127.0.0.1", 0)) as server:
        return int(server.getsockname()[1])
