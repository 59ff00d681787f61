"""OpenCode, headless, in a repository of its own: two turns of one session, and a title beside the first."""

from __future__ import annotations

import json
import subprocess
from pathlib import Path
from typing import Any

import pytest

from tests.support.client_installation import TINY, ClientInstallation
from tests.support.client_packages import ClientPackages, plain_environment

NUM_OUTPUT = 48


class OpenCode:
    """Runs it with a home of its own, where nothing tells it of any other service."""

    def __init__(self, program: Path, home: Path, account: dict[str, str]) -> None:
        self._program = program
        self._work = home / "work"
        self._work.mkdir()
        base = f"{account['EMBERGATE_URL']}/client/v4/accounts/{account['EMBERGATE_ACCOUNT_ID']}/ai/v1"
        model = {"name": "tiny", "tool_call": True, "limit": {"context": 32_768, "output": NUM_OUTPUT}}
        provider = {
            "options": {"baseURL": base, "apiKey": account["EMBERGATE_API_TOKEN"]},
            "models": {TINY: model},
        }
        config = {
            "provider": {"cloudflare-workers-ai": provider},
            "model": f"cloudflare-workers-ai/{TINY}",
            "small_model": f"cloudflare-workers-ai/{TINY}",
        }
        (self._work / "opencode.json").write_text(json.dumps(config))
        (self._work / "calc.py").write_text("def add(a, b):\n    return a - b\n")
        subprocess.run(["git", "init", "-q", str(self._work)], check=True)
        self._environment = plain_environment(
            HOME=str(home),
            OPENCODE_DISABLE_MODELS_FETCH="1",
            OPENCODE_DISABLE_AUTOUPDATE="1",
            CLOUDFLARE_ACCOUNT_ID=account["EMBERGATE_ACCOUNT_ID"],
            CLOUDFLARE_API_KEY=account["EMBERGATE_API_TOKEN"],
            **{f"XDG_{kind}_HOME": str(home / kind) for kind in ("DATA", "CONFIG", "CACHE", "STATE")},
        )

    def run(self, *arguments: str) -> list[Any]:
        """The events of one turn."""
        done = subprocess.run(
            [str(self._program), "run", "--format", "json", *arguments],
            cwd=self._work,
            env=self._environment,
            stdin=subprocess.DEVNULL,
            capture_output=True,
            text=True,
            timeout=240,
            check=False,
        )
        assert done.returncode == 0, done.stdout[-2000:] + done.stderr[-2000:]
        events = [json.loads(line) for line in done.stdout.splitlines()]
        assert [event for event in events if event["type"] == "error"] == []
        return events


def steps_of(events: list[Any]) -> list[Any]:
    """What OpenCode counted of each of its requests: tokens by class."""
    return [event["part"]["tokens"] for event in events if event["type"] == "step_finish"]


@pytest.fixture(scope="module")
def turns(
    packages: ClientPackages, installation: ClientInstallation, tmp_path_factory: pytest.TempPathFactory
) -> list[list[Any]]:
    """The events of both turns."""
    program = packages.npm / "node_modules" / "opencode-linux-x64" / "bin" / "opencode"
    if not program.is_file():
        pytest.skip("OpenCode is pinned for Linux on x64 alone")
    opencode = OpenCode(program, tmp_path_factory.mktemp("opencode"), installation.environment_of())
    return [opencode.run("Fix add in calc.py."), opencode.run("--continue", "Now add a test for it.")]


def test_usage_is_that_of_our_records_and_the_title_evicts_nothing(
    turns: list[list[Any]], installation: ClientInstallation
) -> None:
    (session,) = {event["sessionID"] for events in turns for event in events}
    records = installation.records(session, 3)
    title, *main = sorted(records, key=lambda record: record["prompt_tokens"])
    first, second = (steps_of(events)[-1] for events in turns)
    for tokens, record in zip((first, second), main, strict=True):
        assert tokens["cache"]["read"] == record["cached_prompt_tokens"]
        assert tokens["input"] == record["prompt_tokens"] - record["cached_prompt_tokens"]
        assert tokens["output"] + tokens["reasoning"] == record["completion_tokens"]
    assert title["prompt_tokens"] < main[0]["prompt_tokens"] / 4
    assert title["started_at_us"] < main[1]["started_at_us"]
    assert main[1]["cached_prompt_tokens"] > 0.95 * main[0]["prompt_tokens"]
    assert {record["replica_id"] for record in records} == {"tiny-0"}
