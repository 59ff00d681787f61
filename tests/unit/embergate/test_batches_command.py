"""``embergate batches``"""

from __future__ import annotations

import json
from typing import Any

import pytest

from billing.accounts import AccountDirectory
from billing.store import Store
from gateway.batches.config import BatchesConfig
from tests.support.batches import Clock, Office, chat_item, new_batch, success_of
from tests.support.ledger import ACCOUNT, KIMI, OTHER_ACCOUNT

from .conftest import CommandLine


@pytest.fixture
def batches(command_line: CommandLine) -> CommandLine:
    """One batch that is half done, and one of another account that has not begun."""
    command_line.data_dir.mkdir()
    store = Store.open(f"sqlite:///{command_line.data_dir / 'ledger.db'}")
    for account in (ACCOUNT, OTHER_ACCOUNT):
        AccountDirectory(store).create_account("test", account)
    office = Office.on(store, BatchesConfig(), Clock())
    office.queue.submit(new_batch("first", [chat_item(f"question {number}") for number in range(4)]))
    office.queue.end([success_of(lease) for lease in office.lease_all("first", max_items=2)])
    office.clock.sleep(60)
    office.queue.submit(new_batch("second", [chat_item("question")], account_id=OTHER_ACCOUNT))
    store.close()
    return command_line


def answer(command_line: CommandLine, *arguments: str) -> Any:
    done = command_line.run("batches", *arguments, "--json")
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout)


def test_the_newest_come_first(batches: CommandLine) -> None:
    assert [batch["id"] for batch in answer(batches, "list")] == ["second", "first"]
    assert [batch["id"] for batch in answer(batches, "list", "--account", ACCOUNT)] == ["first"]
    assert [batch["id"] for batch in answer(batches, "list", "--limit", "1")] == ["second"]
    shown = batches.run("batches", "list").stdout
    assert "running" in shown
    assert KIMI in shown


def test_a_batch_is_shown_with_what_it_cost(batches: CommandLine) -> None:
    batch = answer(batches, "show", "first")
    assert batch["status"] == "in_progress"
    assert batch["request_counts"] == {"total": 4, "completed": 2, "failed": 0}
    assert batch["usage"]["input_tokens"] == 2_000
    assert batch["amount_nanos"] == 2 * (200 * 600 + 800 * 100 + 50 * 3_000)
    shown = batches.run("batches", "show", "first").stdout
    assert "4, 2 succeeded, 0 did not" in shown
    assert "0.0007" in shown


def test_a_batch_can_be_cancelled_once(batches: CommandLine) -> None:
    done = batches.run("batches", "cancel", "first")
    assert done.returncode == 0, done.stderr
    assert "2 items are cancelled" in done.stderr
    assert answer(batches, "show", "first")["status"] == "cancelled"
    done = batches.run("batches", "cancel", "first")
    assert (done.returncode, done.stderr) == (1, "embergate: batch first is cancelled\n")


@pytest.mark.parametrize("command", ["show", "cancel"])
def test_what_is_not_there_is_refused(batches: CommandLine, command: str) -> None:
    done = batches.run("batches", command, "none")
    assert (done.returncode, done.stderr) == (1, "embergate: there is no batch 'none'\n")
