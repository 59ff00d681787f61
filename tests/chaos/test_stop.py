"""Stopping during load: what was accepted is answered, what comes later is refused, nothing is left."""

from __future__ import annotations

import asyncio
import os
import re
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from tests.support.chat import ChatClient
from tests.support.installation import ALIAS, Installation
from tests.support.load import Load
from tests.support.waiting import eventually

pytestmark = [pytest.mark.chaos, pytest.mark.model, pytest.mark.slow]


async def test_down_answers_what_is_in_flight(installation: Installation) -> None:
    async with ChatClient(installation.account) as client:
        asking = [
            asyncio.create_task(
                client.complete(
                    ALIAS,
                    [{"role": "user", "content": f"Count upwards from {number}."}],
                    session=f"drain-{number}",
                    stream=True,
                    max_tokens=60,
                    ignore_eos=True,
                )
            )
            for number in range(6)
        ]
        await asyncio.sleep(0.7)
        assert not any(task.done() for task in asking)
        stopped = await asyncio.to_thread(installation.run, "down")
        outcomes = await asyncio.gather(*asking)
        late = await client.complete(ALIAS, [{"role": "user", "content": "Too late?"}])
    assert stopped.returncode == 0
    assert [outcome for outcome in outcomes if not outcome.is_complete] == []
    assert {outcome.completion_tokens for outcome in outcomes} == {60}
    assert not late.is_complete
    assert installation.own_processes() == []
    rows = await asyncio.to_thread(installation.run_json, "usage", "--by", "request")
    assert {outcome.request_id for outcome in outcomes} <= {row["key"] for row in rows["rows"]}
    assert (await asyncio.to_thread(installation.run, "audit")).returncode == 0
    assert (await asyncio.to_thread(installation.run, "status")).returncode == 3


async def test_ctrl_c_in_the_foreground_stops_everything(installation: Installation) -> None:
    output = installation.home / "up.out"
    up = start_in_the_foreground(installation, output)
    try:
        await eventually(lambda: "Embergate is ready" in output.read_text() or up.poll() is not None, 120)
        assert up.poll() is None, output.read_text()
        assert_curl_works(output)
        load = Load(installation, num_users=2, max_tokens=8, max_requests=4)
        await load.run()
        os.killpg(up.pid, signal.SIGINT)
        assert await asyncio.to_thread(up.wait, 60) == 0
    finally:
        up.kill()
        up.wait()
    assert output.read_text().rstrip().endswith("Stopped.")
    assert installation.own_processes() == []


def start_in_the_foreground(installation: Installation, output: Path) -> subprocess.Popen[bytes]:
    with output.open("wb") as file:
        return subprocess.Popen(
            [sys.executable, "-m", "embergate", "up"],
            cwd=installation.home,
            env=installation.environment,
            stdout=file,
            stderr=file,
            start_new_session=True,
        )


def assert_curl_works(output: Path) -> None:
    """The command that ``up`` prints answers when pasted into a shell."""
    command = re.search(r"^curl .*?\}'$", output.read_text(), re.MULTILINE | re.DOTALL)
    assert command is not None
    done = subprocess.run(
        ["sh", "-c", command.group(0)], capture_output=True, text=True, timeout=60, check=False
    )
    assert '"success":true' in done.stdout, done.stdout + done.stderr
