"""``wrangler dev`` offline with the plugin in deploy/wrangler, and wrangler's own questions about models."""

from __future__ import annotations

import json
import subprocess
import urllib.request
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.support.client_installation import ClientInstallation
from tests.support.client_packages import ClientPackages
from tests.support.installation import ALIAS, MODEL
from tests.support.wrangler_dev import (
    PLUGIN,
    documented_config,
    wrangler_command,
    wrangler_dev,
    wrangler_environment,
)

MESSAGES = [{"role": "user", "content": "Name a city."}]


@pytest.fixture(scope="module")
def dev(
    packages: ClientPackages, installation: ClientInstallation, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[str]:
    """The address of a Worker under ``wrangler dev``."""
    project = tmp_path_factory.mktemp("project")
    with wrangler_dev(packages, "chat.js", project, installation.environment_of()) as url:
        yield url


def chat(url: str, session: str) -> list[Any]:
    """The frames of one streamed chat."""
    body = json.dumps({"model": ALIAS, "messages": MESSAGES, "session": session}).encode()
    with urllib.request.urlopen(urllib.request.Request(url, body), timeout=120) as response:
        assert response.headers["content-type"] == "text/event-stream"
        text = response.read().decode()
    payloads = [frame.removeprefix("data: ") for frame in text.split("\n\n") if frame]
    return [each if each == "[DONE]" else json.loads(each) for each in payloads]


def test_a_worker_under_wrangler_dev_streams_a_chat_offline(
    dev: str, installation: ClientInstallation
) -> None:
    *chunks, usage, tail, done = chat(dev, "wrangler-session")
    assert "".join(chunk["choices"][0]["delta"].get("content") or "" for chunk in chunks)
    assert done == "[DONE]"
    (record,) = installation.records("wrangler-session", 1)
    assert (record["surface"], record["model"]) == ("binding", MODEL)
    assert (
        record["completion_tokens"]
        == tail["usage"]["completion_tokens"]
        == usage["usage"]["completion_tokens"]
    )


@pytest.mark.parametrize(
    ("command", "expected"),
    [
        (("ai", "models", "list"), "@cf/moonshotai/kimi-k2.5"),
        (("ai", "models", "schema", ALIAS), "ChatBody"),
        (("whoami",), "Account ID"),
    ],
    ids=lambda value: value[-1] if isinstance(value, tuple) else "",
)
def test_wrangler_itself_can_ask(
    packages: ClientPackages,
    installation: ClientInstallation,
    tmp_path: Path,
    command: tuple[str, ...],
    expected: str,
) -> None:
    account = installation.account
    variables = {
        "CLOUDFLARE_API_BASE_URL": f"{account.url}/client/v4",
        "CLOUDFLARE_API_TOKEN": account.api_token,
        "CLOUDFLARE_ACCOUNT_ID": account.account_id,
    }
    done = subprocess.run(
        wrangler_command(packages, *command),
        cwd=tmp_path,
        env=wrangler_environment(tmp_path, **variables),
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )
    assert done.returncode == 0, done.stdout[-2000:] + done.stderr[-2000:]
    assert expected in done.stdout


def test_the_plugin_is_ready_for_npm() -> None:
    package = json.loads((PLUGIN / "package.json").read_text())
    assert all((PLUGIN / file).is_file() for file in [*package["files"], package["main"]])
    plugin = documented_config()["unsafe"]["bindings"][0]["dev"]["plugin"]
    assert plugin["package"] == package["name"]
