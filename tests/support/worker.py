"""Workers in a real workerd, connected to a gateway by the snippet that deploy/wrangler documents."""

from __future__ import annotations

import json
import subprocess
import time
import urllib.error
import urllib.request
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from tests.support.client_packages import ClientPackages, plain_environment
from tests.support.ports import free_port

SNIPPET = Path(__file__).parents[2] / "deploy" / "wrangler" / "workerd.capnp"
_START_TIMEOUT_S = 60.0


class Worker:
    """A running Worker at ``url`` that takes orders as JSON."""

    def __init__(self, url: str) -> None:
        self.url = url

    def do(self, action: str, **order: Any) -> dict[str, Any]:
        """What came of one order: ``result`` or ``error``, and what the binding ``seen``."""
        body = json.dumps({"action": action, **order}).encode()
        with urllib.request.urlopen(urllib.request.Request(self.url, body), timeout=120) as response:
            answer: dict[str, Any] = json.load(response)
        return answer

    def result(self, action: str, **order: Any) -> Any:
        """The result of an order that must succeed."""
        answer = self.do(action, **order)
        assert "error" not in answer, answer
        return answer["result"]


def workerd_config(script: Path, port: int, account: Mapping[str, str]) -> str:
    """The documented snippet with this Worker, this port and this account filled in."""
    address = account["EMBERGATE_URL"].removeprefix("http://")
    config = SNIPPET.read_text()
    for place, value in (
        ('embed "worker.js"', f'embed "{script.name}"'),
        ("127.0.0.1:8787", address),
        ("127.0.0.1:8080", f"127.0.0.1:{port}"),
        ('"Bearer EMBERGATE_API_TOKEN"', f'"Bearer {account["EMBERGATE_API_TOKEN"]}"'),
        ('"EMBERGATE_ACCOUNT_ID"', f'"{account["EMBERGATE_ACCOUNT_ID"]}"'),
    ):
        assert config.count(place) == 1, place
        config = config.replace(place, value)
    return config


@contextmanager
def workerd(
    packages: ClientPackages, script: Path, directory: Path, account: Mapping[str, str]
) -> Iterator[Worker]:
    """A Worker in workerd for as long as the context lasts; ``directory`` is its own."""
    port = free_port()
    (directory / script.name).write_text(script.read_text())
    (directory / "config.capnp").write_text(workerd_config(script, port, account))
    command = [str(packages.workerd), "serve", "config.capnp"]
    with (directory / "workerd.log").open("wb") as log:
        process = subprocess.Popen(
            command,
            cwd=directory,
            env=plain_environment(),
            stdin=subprocess.DEVNULL,
            stdout=log,
            stderr=subprocess.STDOUT,
        )
    try:
        wait_for(f"http://127.0.0.1:{port}", process, directory / "workerd.log")
        yield Worker(f"http://127.0.0.1:{port}")
    finally:
        process.terminate()
        process.wait(10)


def wait_for(url: str, process: subprocess.Popen[bytes], log: Path) -> None:
    """Return when something answers at ``url``, whatever it says."""
    deadline = time.monotonic() + _START_TIMEOUT_S
    while time.monotonic() < deadline and process.poll() is None:
        try:
            urllib.request.urlopen(url, timeout=5).close()
            return
        except urllib.error.HTTPError:
            return
        except OSError:
            time.sleep(0.1)
    raise AssertionError(f"nothing answers at {url}\n{log.read_text()[-4000:]}")
