"""``kill -9`` of a replica during load."""

from __future__ import annotations

import asyncio
import os
import signal

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


@pytest.mark.parametrize("victim", ["the process", "its engine"])
async def test_no_short_answer_looks_whole_and_service_recovers_by_itself(
    installation: Installation, victim: str
) -> None:
    load = Load(installation, num_users=8, max_tokens=40)
    running = asyncio.create_task(load.run())
    await eventually(lambda: load.count(is_complete) >= 8, timeout_s=60)

    leader = psutil.Process(installation.pid_of("replica-0"))
    pid = leader.pid if victim == "the process" else max(leader.children(), key=_memory).pid
    num_restarts = installation.process("replica-0").num_restarts
    os.kill(pid, signal.SIGKILL)

    num_before = load.count(is_complete)
    await eventually(lambda: load.count(is_complete) >= num_before + 8, timeout_s=60)
    await eventually(
        lambda: installation.is_ready() and installation.process("replica-0").num_restarts > num_restarts,
        timeout_s=90,
    )
    num_recovered = len([o for o in load.outcomes if o.is_complete and o.replica == "replica-0"])
    await eventually(
        lambda: load.count(lambda o: o.is_complete and o.replica == "replica-0") > num_recovered,
        timeout_s=60,
    )
    load.stop()
    outcomes = await running

    assert load.lies() == []
    failed = [outcome for outcome in outcomes if not outcome.is_complete]
    assert len(failed) <= 8, "only what was in flight on the replica may fail"
    assert all(outcome.error for outcome in failed)
    assert all(outcome.request_id for outcome in outcomes)

    rows = await asyncio.to_thread(settled_usage, installation, "--by", "request")
    audit = await asyncio.to_thread(installation.run, "audit")
    assert audit.returncode == 0, audit.stdout + audit.stderr
    by_id = {row["key"]: row for row in rows["rows"]}
    for outcome in outcomes:
        row = by_id[outcome.request_id]
        if outcome.is_complete:
            assert row["completion_tokens"] == outcome.completion_tokens
            assert row["num_by_status"]["ok"] == 1
        else:
            assert row["num_by_status"]["replica_lost"] == 1
            assert row["amount_nanos"] == 0


def _memory(process: psutil.Process) -> int:
    return int(process.memory_info().rss)
