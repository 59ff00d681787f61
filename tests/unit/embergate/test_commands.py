"""The commands that need no running processes, from arguments to output and exit code."""

from __future__ import annotations

import json
import os
import re
import sqlite3
from typing import Any

import pytest

from billing.config import BillingConfig, RateCardConfig, SpoolConfig
from billing.rates import RateBook
from billing.spool import Spool
from billing.store import Store
from billing.usage import UsageRecord
from embergate.commands.up import first_request
from embergate.dev_account import DevAccount
from embergate.run_state import ProcessIdentity, RunState, StateFile
from embergate.terminal import voice
from tests.unit.embergate.conftest import MODEL, CommandLine

STARTED_AT_US = 1_796_000_000_000_000
"""2026-11-30T00:53:20Z"""


def record(number: int, account_id: str, **changes: Any) -> UsageRecord:
    return UsageRecord(
        **{
            "request_id": f"request-{number}",
            "account_id": account_id,
            "token_id": "token",
            "model": MODEL,
            "requested_model": MODEL,
            "surface": "run",
            "replica_id": "replica-0",
            "session": f"session-{number % 2}",
            "started_at_us": STARTED_AT_US + number * 1_000_000,
            "finished_at_us": STARTED_AT_US + number * 1_000_000 + 500_000,
            "prompt_tokens": 1_000,
            "cached_prompt_tokens": 800,
            "completion_tokens": 100,
            **changes,
        }
    )


@pytest.fixture
def account_id(command_line: CommandLine) -> str:
    """An account with three requests on its books."""
    done = command_line.run("accounts", "create", "acme", "--json")
    account_id: str = json.loads(done.stdout)[0]["id"]
    card = RateCardConfig(
        model=MODEL, effective_from="2020-01-01", input="0.05", cached_input="0.01", output="0.20"
    )
    store = Store.open(f"sqlite:///{command_line.data_dir / 'ledger.db'}")
    store.post(
        [record(number, account_id) for number in range(3)],
        RateBook.from_config(BillingConfig(rate_cards=[card])),
    )
    store.close()
    return account_id


def answer(command_line: CommandLine, *arguments: str) -> Any:
    done = command_line.run(*arguments, "--json")
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout)


def test_a_token_is_printed_once_and_never_listed(command_line: CommandLine, account_id: str) -> None:
    made = command_line.run("tokens", "create", "--account", account_id, "--name", "laptop")
    secret = made.stdout.strip()
    assert len(secret) >= 32
    listed = command_line.run("tokens", "list", "--account", account_id)
    assert "laptop" in listed.stdout
    assert secret not in listed.stdout


def test_an_imported_token_is_read_from_standard_input(command_line: CommandLine, account_id: str) -> None:
    done = command_line.run("tokens", "import", "--account", account_id, stdin=f"{'s' * 40}\n")
    assert done.returncode == 0, done.stderr
    (token,) = answer(command_line, "tokens", "list")
    assert token["name"] == "imported"
    assert command_line.run("tokens", "revoke", token["id"]).returncode == 0
    assert answer(command_line, "tokens", "list")[0]["revoked_at_us"] is not None


def test_what_does_not_exist_is_refused_in_one_sentence(command_line: CommandLine) -> None:
    for arguments in (
        ("tokens", "create", "--account", "f" * 32),
        ("tokens", "revoke", "nothing"),
        ("accounts", "create", "x", "--id", "not-hex"),
        ("statement", "--account", "f" * 32),
        ("statement",),
    ):
        done = command_line.run(*arguments)
        assert done.returncode == 1, arguments
        assert done.stderr.startswith("embergate: ")
        assert done.stderr.count("\n") == 1


def test_usage_shows_cost_with_and_without_the_cache(command_line: CommandLine, account_id: str) -> None:
    total = answer(command_line, "usage", "--account", account_id)["total"]
    assert total["num_requests"] == 3
    assert total["cached_share"] == 0.8
    assert total["amount_nanos"] == 3 * (200 * 50 + 800 * 10 + 100 * 200)
    assert total["undiscounted_nanos"] == 3 * (1_000 * 50 + 100 * 200)
    rows = answer(command_line, "usage", "--by", "session")["rows"]
    assert {row["key"]: row["num_requests"] for row in rows} == {"session-0": 2, "session-1": 1}
    since = answer(command_line, "usage", "--since", "2026-11-30T00:53:21Z")["total"]
    assert since["num_requests"] == 2
    assert MODEL in command_line.run("usage").stdout
    assert command_line.run("usage", "--since", "yesterday").returncode == 2


@pytest.mark.parametrize("arguments", [("usage", "--by", "request"), ("statement", "--month", "2026-11")])
def test_money_lines_up(command_line: CommandLine, account_id: str, arguments: tuple[str, ...]) -> None:
    shown = command_line.run(*arguments, "--account", account_id).stdout
    table = shown.partition("\n\ntotal")[0]
    places = {len(found) for found in re.findall(r"\.(\d+) USD", table)}
    assert len(places) == 1, table


def test_the_first_request_to_paste_is_greedy() -> None:
    account = DevAccount("http://127.0.0.1:1", "a" * 32, "t")
    body = first_request(account, MODEL).rpartition("-d ")[2].strip("'")
    assert json.loads(body)["temperature"] == 0


def test_a_command_without_progress_says_nothing_about_it(capfd: pytest.CaptureFixture[str]) -> None:
    with voice():
        pass
    assert capfd.readouterr() == ("", "")


def test_a_statement_adds_up(command_line: CommandLine, account_id: str) -> None:
    bill = answer(command_line, "statement", "--account", account_id, "--month", "2026-11")
    assert bill["amount_nanos"] == sum(line["amount_nanos"] for line in bill["lines"]) > 0
    shown = command_line.run("statement", "--account", account_id, "--month", "2026-11").stdout
    assert "acme" in shown
    assert "3 requests" in shown


def test_an_audit_passes_and_any_drift_fails_it(command_line: CommandLine, account_id: str) -> None:
    done = command_line.run("audit")
    assert done.returncode == 0
    assert "The books are right." in done.stdout
    with sqlite3.connect(command_line.data_dir / "ledger.db") as database:
        triggers = database.execute("select name from sqlite_master where type = 'trigger'").fetchall()
        for (name,) in triggers:
            database.execute(f"drop trigger {name}")
        database.execute("update usage_records set completion_tokens = 101 where request_id = 'request-1'")
    database.close()
    done = command_line.run("audit")
    assert done.returncode == 1
    assert "request-1" in done.stdout
    findings = json.loads(command_line.run("audit", "--json").stdout)["findings"]
    kinds = {finding["kind"] for finding in findings}
    assert kinds == {"wrong_price", "wrong_rollup", "wrong_receipt"}


def test_nothing_runs_at_first(command_line: CommandLine) -> None:
    done = command_line.run("status")
    assert done.returncode == 3
    assert "Nothing is running" in done.stderr
    done = command_line.run("down")
    assert done.returncode == 0
    assert "Nothing is running." in done.stderr
    done = command_line.run("logs")
    assert done.returncode == 1
    assert "there are no logs" in done.stderr


def test_status_says_why_the_last_start_failed(command_line: CommandLine) -> None:
    run_dir = command_line.data_dir / "run"
    run_dir.mkdir(parents=True)
    gone = ProcessIdentity(pid=os.getpid(), started_at=0.0)
    StateFile(run_dir).write(RunState(supervisor=gone, phase="failed", message="the disk is full"))
    done = command_line.run("status")
    assert done.returncode == 3
    assert "the last start failed: the disk is full" in done.stderr


def test_logs_are_shown_by_process(command_line: CommandLine) -> None:
    logs = command_line.data_dir / "logs"
    logs.mkdir(parents=True)
    (logs / "gateway.log").write_text("one\ntwo\n")
    (logs / "replica-0.log").write_text("three\n")
    assert command_line.run("logs").stdout == "gateway   | one\ngateway   | two\nreplica-0 | three\n"
    assert command_line.run("logs", "gateway", "-n", "1").stdout == "gateway | two\n"
    done = command_line.run("logs", "nobody")
    assert "there are gateway, replica-0" in done.stderr


def test_a_bad_configuration_is_refused_with_its_path(command_line: CommandLine) -> None:
    config = command_line.home / "config.yaml"
    config.write_text(config.read_text().replace("port:", "prot:", 1))
    done = command_line.run("up")
    assert done.returncode == 1
    assert done.stderr == "embergate: config.yaml: gateway.prot: unknown key; did you mean port?\n"


def test_a_model_that_is_not_there_is_refused(command_line: CommandLine) -> None:
    config = command_line.home / "config.yaml"
    config.write_text(config.read_text().replace(f"id: '{MODEL}'", f"id: '{MODEL}', source: ./nowhere"))
    done = command_line.run("up")
    assert done.returncode == 1
    assert f"the model {MODEL} is not at {command_line.home}/nowhere" in done.stderr
    (row,) = answer(command_line, "models", "list")
    assert row["source"] == "./nowhere"
    assert row["state"] == f"missing: there is no {command_line.home}/nowhere"


def test_a_model_that_the_first_start_prepares_is_said_so(command_line: CommandLine) -> None:
    (row,) = answer(command_line, "models", "list")
    assert row["state"] == "prepared at the first start"


def test_usage_of_an_account_that_is_not_there_is_refused(command_line: CommandLine, account_id: str) -> None:
    done = command_line.run("usage", "--account", "nope")
    assert done.returncode == 1
    assert done.stderr == "embergate: there is no account 'nope'\n"


def test_usage_shows_the_latest_requests_within_its_limit(command_line: CommandLine, account_id: str) -> None:
    shown = answer(command_line, "usage", "--by", "request", "--limit", "2")
    assert [row["key"] for row in shown["rows"]] == ["request-1", "request-2"]
    assert shown["is_truncated"]
    until = answer(command_line, "usage", "--until", "2026-11-30T00:53:21Z")["total"]
    assert until["num_requests"] == 1


def test_a_negative_number_of_log_lines_is_refused(command_line: CommandLine) -> None:
    assert command_line.run("logs", "-n", "-5").returncode == 2


def test_usage_says_how_many_records_wait_in_the_journal(command_line: CommandLine, account_id: str) -> None:
    assert "wait in the journal" not in command_line.run("usage").stderr
    spool = Spool(command_line.data_dir / "spool", SpoolConfig())
    spool.append([record(2, account_id), record(7, account_id)])
    spool.close()
    assert command_line.run("usage", "--json").stderr.startswith("1 usage records wait in the journal")


def test_credit_is_booked_once_and_stands_on_the_statement(
    command_line: CommandLine, account_id: str
) -> None:
    add = ("credit", "add", "--account", account_id, "--amount", "25.00", "--reference", "pay-1")
    (first,), (again,) = answer(command_line, *add), answer(command_line, *add)
    assert first == again
    assert first["amount_nanos"] == 25_000_000_000
    (note,) = answer(
        command_line, "credit", "note", "--account", account_id, "--request", "request-1",
        "--reason", "Wrong answer",
    )  # fmt: skip
    assert note["amount_nanos"] == 38_000
    assert len(answer(command_line, "credit", "list", "--account", account_id)) == 2

    month = answer(command_line, "statement", "--account", account_id)["month"]
    bill = answer(command_line, "statement", "--account", account_id, "--month", month)
    assert bill["topped_up_nanos"] == 25_000_000_000
    shown = command_line.run("statement", "--account", account_id).stdout
    assert "Prepaid credit" in shown
    assert "balance so far" in shown
    assert "provisional, as of" in shown
    assert command_line.run("audit").returncode == 0


def test_a_credit_that_makes_no_sense_is_refused_in_one_sentence(
    command_line: CommandLine, account_id: str
) -> None:
    done = command_line.run("credit", "add", "--account", account_id, "--amount", "-5")
    assert done.returncode == 2
    assert "--amount" in done.stderr
    done = command_line.run("credit", "note", "--account", account_id, "--reason", "Why")
    assert done.returncode == 1
    assert (
        done.stderr.strip()
        == "embergate: a credit note needs an amount, or the request whose charge is given back"
    )


def test_budgets_are_set_listed_and_lifted(command_line: CommandLine, account_id: str) -> None:
    set_it = ("budgets", "set", "--account", account_id, "--period", "total", "--limit", "0.5")
    (state,) = answer(command_line, *set_it, "--since", "2020-01-01")
    assert (state["limit_nanos"], state["charged_nanos"]) == (500_000_000, 3 * 38_000)
    assert answer(command_line, "budgets", "list") == [state]
    assert "0.50 USD" in command_line.run("budgets", "list").stdout
    done = command_line.run("budgets", "remove", state["budget"]["id"])
    assert "is lifted" in done.stderr + done.stdout
    assert answer(command_line, "budgets", "list") == []


def test_a_budget_of_nobody_is_refused(command_line: CommandLine, account_id: str) -> None:
    done = command_line.run("budgets", "set", "--account", "0" * 32, "--period", "daily")
    assert done.returncode == 1
    assert "there is no account" in done.stderr
    assert command_line.run("budgets", "set", "--account", account_id, "--period", "yearly").returncode == 2


def test_a_receipt_is_shown_checked_and_refused_when_changed(
    command_line: CommandLine, account_id: str
) -> None:
    shown = command_line.run("receipts", "show", "request-1", "--account", account_id)
    assert shown.returncode == 0, shown.stderr
    file = command_line.data_dir / "receipt.json"
    file.write_text(shown.stdout)
    done = command_line.run("receipts", "verify", str(file))
    assert done.returncode == 0
    assert "The signature and the arithmetic are right." in done.stdout

    assert command_line.run("receipts", "rotate").returncode == 0
    keys = command_line.data_dir / "jwks.json"
    keys.write_text(command_line.run("receipts", "keys", "--json").stdout)
    assert len(json.loads(keys.read_text())["keys"]) == 2
    assert command_line.run("receipts", "verify", str(file), "--keys", str(keys)).returncode == 0

    changed = json.loads(shown.stdout)
    changed["receipt"]["cached_prompt_tokens"] += 1
    file.write_text(json.dumps(changed))
    done = command_line.run("receipts", "verify", str(file))
    assert done.returncode == 1
    assert "This receipt does not hold." in done.stdout


def test_what_is_no_receipt_is_refused_in_one_sentence(command_line: CommandLine, account_id: str) -> None:
    file = command_line.data_dir / "receipt.json"
    for text in ("{}", "no JSON"):
        file.write_text(text)
        done = command_line.run("receipts", "verify", str(file))
        assert done.returncode == 1
        assert done.stderr.startswith("embergate: ")
    done = command_line.run("receipts", "show", "unknown", "--account", account_id)
    assert "has no request 'unknown' on the books" in done.stderr
