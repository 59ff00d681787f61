"""``kill -9`` of the gateway, and of everything at once, during load."""

from __future__ import annotations

import asyncio
import os
import signal
from typing import Any

import psutil
import pytest

from tests.support.chat import Outcome
from tests.support.installation import Installation
from tests.support.load import Load
from tests.support.settled import settled_usage
from tests.support.waiting import eventually

pytestmark = [pytest.mark.chaos, pytest.mark.model, pytest.mark.slow]


def is_complete(outcome: Outcome) -> bool:
    return outcome.is_complete


async def test_nothing_that_a_client_saw_is_missing_and_nothing_is_billed_twice(
    installation: Installation,
) -> None:
    load = Load(installation, num_users=8, max_tokens=16)
    running = asyncio.create_task(load.run())
    await eventually(lambda: load.count(is_complete) >= 12, timeout_s=60)
    os.kill(installation.pid_of("gateway"), signal.SIGKILL)
    num_before = load.count(is_complete)
    await eventually(lambda: load.count(is_complete) >= num_before + 12, timeout_s=60)
    load.stop()
    await running
    await eventually(installation.is_ready, timeout_s=60)
    assert load.lies() == []
    await assert_books_are_right(installation, load)


async def test_the_same_holds_when_everything_is_killed_and_started_again(installation: Installation) -> None:
    load = Load(installation, num_users=6, max_tokens=16)
    running = asyncio.create_task(load.run())
    await eventually(lambda: load.count(is_complete) >= 8, timeout_s=60)
    assert installation.state is not None
    os.kill(installation.pid_of("gateway"), signal.SIGKILL)
    os.kill(installation.state.supervisor.pid, signal.SIGKILL)
    load.stop()
    await running
    await asyncio.to_thread(installation.up)
    assert load.lies() == []
    assert len(installation.own_processes()) <= 1 + 3 + 2 * 2
    await assert_books_are_right(installation, load)


async def test_a_killed_supervisor_takes_its_processes_along(installation: Installation) -> None:
    assert installation.state is not None
    os.kill(installation.state.supervisor.pid, signal.SIGKILL)
    await eventually(lambda: installation.own_processes() == [], timeout_s=45)
    status = await asyncio.to_thread(installation.run, "status")
    assert status.returncode == 3
    await asyncio.to_thread(installation.up)


async def assert_books_are_right(installation: Installation, load: Load) -> None:
    """Every answer that a client saw the end of is in the ledger, once, with the figures that it saw."""

    rows = (await asyncio.to_thread(settled_usage, installation, "--by", "request"))["rows"]
    by_id: dict[str, dict[str, Any]] = {row["key"]: row for row in rows}
    assert len(by_id) == len(rows)
    seen = [outcome for outcome in load.outcomes if outcome.is_complete]
    missing = [outcome.request_id for outcome in seen if outcome.request_id not in by_id]
    assert missing == []
    for outcome in seen:
        row = by_id[outcome.request_id]
        assert row["num_requests"] == 1
        assert row["prompt_tokens"] == outcome.prompt_tokens
        assert row["cached_prompt_tokens"] == outcome.cached_tokens
        assert row["completion_tokens"] == outcome.completion_tokens
    audit = await asyncio.to_thread(installation.run, "audit")
    assert audit.returncode == 0, audit.stdout + audit.stderr
    assert psutil.Process(installation.pid_of("gateway")).is_running()
