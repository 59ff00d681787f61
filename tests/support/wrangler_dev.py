"""Workers under ``wrangler dev``, offline, with plugin and configuration as deploy/wrangler has them."""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from tests.support.client_packages import ROOT, SOURCES, ClientPackages, plain_environment
from tests.support.ports import free_port
from tests.support.worker import wait_for

PLUGIN = ROOT / "deploy" / "wrangler"
_NOWHERE = "http://127.0.0.1:9"


def documented_config() -> dict[str, Any]:
    """The wrangler.jsonc of the plugin's README."""
    block = re.search(r"```jsonc\n(.*?)```", (PLUGIN / "README.md").read_text(), re.DOTALL)
    assert block is not None
    config: dict[str, Any] = json.loads(block.group(1))
    return config


def wrangler_environment(home: Path, **variables: str) -> dict[str, str]:
    """No account of Cloudflare's, no way out to its API, and no terminal."""
    return plain_environment(
        HOME=str(home),
        XDG_CONFIG_HOME=str(home / "config"),
        WRANGLER_SEND_METRICS="false",
        WRANGLER_LOG_PATH=str(home / "logs"),
        HTTP_PROXY=_NOWHERE,
        HTTPS_PROXY=_NOWHERE,
        NO_PROXY="127.0.0.1,localhost",
        CI="1",
        **variables,
    )


def wrangler_command(packages: ClientPackages, *arguments: str) -> list[str]:
    """A command line of the pinned wrangler."""
    wrangler = packages.npm / "node_modules" / "wrangler" / "bin" / "wrangler.js"
    return [packages.node, str(wrangler), *arguments]


@contextmanager
def wrangler_dev(
    packages: ClientPackages,
    script: str,
    project: Path,
    account: Mapping[str, str],
    more_config: Mapping[str, Any] | None = None,
) -> Iterator[str]:
    """The address of ``workers/SCRIPT`` for as long as the context lasts; ``project`` is its directory."""
    packages.link("embergate-wrangler", PLUGIN)
    (project / "node_modules").symlink_to(packages.npm / "node_modules", target_is_directory=True)
    (project / script).write_text((SOURCES / "workers" / script).read_text())
    config = documented_config() | {"main": script} | dict(more_config or {})
    (project / "wrangler.jsonc").write_text(json.dumps(config))
    port = free_port()
    addresses = ("--ip", "127.0.0.1", "--port", str(port), "--inspector-port", str(free_port()))
    log = project / "wrangler.log"
    with log.open("wb") as file:
        process = subprocess.Popen(
            wrangler_command(packages, "dev", *addresses),
            cwd=project,
            env=wrangler_environment(project, CLOUDFLARE_API_BASE_URL=_NOWHERE, **account),
            stdin=subprocess.DEVNULL,
            stdout=file,
            stderr=subprocess.STDOUT,
            start_new_session=True,
        )
    try:
        wait_for(f"http://127.0.0.1:{port}", process, log)
        yield f"http://127.0.0.1:{port}"
    finally:
        os.killpg(process.pid, signal.SIGTERM)
        process.wait(20)
