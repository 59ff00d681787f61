"""``embergate export``, ``savings`` and ``rollups``, from arguments to output and exit code."""

from __future__ import annotations

import csv
import json
import sqlite3
from decimal import Decimal

import pytest
from pyarrow import parquet

from billing.config import BillingConfig, RateCardConfig
from billing.rates import RateBook
from billing.store import Store
from tests.unit.embergate.conftest import MODEL, CommandLine
from tests.unit.embergate.test_commands import record

BILLING = BillingConfig(
    rate_cards=[
        RateCardConfig(
            model=MODEL, effective_from="2020-01-01", input="0.05", cached_input="0.01", output="0.20"
        )
    ]
)


@pytest.fixture
def account_id(command_line: CommandLine) -> str:
    """An account with ten requests on its books."""
    [made] = json.loads(command_line.run("accounts", "create", "shop", "--json").stdout)
    found = str(made["id"])
    store = Store.open(BILLING.database_url_in(command_line.data_dir))
    store.post([record(number, found) for number in range(10)], RateBook.from_config(BILLING))
    store.close()
    return found


def test_focus_rows_add_up_to_the_usage(command_line: CommandLine, account_id: str) -> None:
    done = command_line.run("export", "--output", "rows.csv", "--account", account_id)
    assert (done.returncode, done.stderr) == (0, "Wrote 3 rows to rows.csv.\n")
    rows = list(csv.DictReader((command_line.home / "rows.csv").read_text().splitlines()))
    usage = json.loads(command_line.run("usage", "--json").stdout)
    assert sum(Decimal(row["BilledCost"]) for row in rows) == Decimal(usage["total"]["amount"])
    command_line.run("export", "--format", "focus-parquet", "--output", "rows.parquet")
    table = parquet.read_table(command_line.home / "rows.parquet")
    assert table.column("x_RowId").to_pylist() == [row["x_RowId"] for row in rows]
    assert sorted(path.name for path in command_line.home.glob("*rows*")) == ["rows.csv", "rows.parquet"]


def test_events_are_lines(command_line: CommandLine, account_id: str) -> None:
    done = command_line.run("export", "--format", "cloudevents", "--output", "events.jsonl")
    assert done.returncode == 0
    lines = [json.loads(line) for line in (command_line.home / "events.jsonl").read_text().splitlines()]
    assert len(lines) == len({line["id"] for line in lines}) == 30
    later = command_line.run("export", "--format", "cloudevents", "--since", "2027-01-01", "--output", "none")
    assert "Wrote 0 events" in later.stderr


def test_what_cannot_be_written_or_pushed_is_said(command_line: CommandLine, account_id: str) -> None:
    done = command_line.run("export", "--output", "missing/rows.csv")
    assert (done.returncode, "cannot write missing/rows.csv" in done.stderr) == (1, True)
    done = command_line.run("export", "--push", "ftp://elsewhere")
    assert (done.returncode, "begins with neither" in done.stderr) == (1, True)


def test_savings_of_recorded_usage_and_of_the_example(command_line: CommandLine, account_id: str) -> None:
    found = json.loads(command_line.run("savings", "--json", "--account", account_id).stdout)
    assert found["num_requests"] == 10
    assert found["saved_nanos"] == found["undiscounted_nanos"] - found["amount_nanos"] > 0
    shown = command_line.run("savings", "--example")
    assert "2,399,145.00 USD" in shown.stdout
    assert "7 billion tokens a day" in shown.stdout + shown.stderr
    assert "no account" in command_line.run("savings", "--account", "0" * 32).stderr


def test_sums_are_checked_and_rebuilt(command_line: CommandLine, account_id: str) -> None:
    assert command_line.run("rollups", "check").returncode == 0
    with sqlite3.connect(command_line.data_dir / "ledger.db") as connection:
        connection.execute("UPDATE rollup_days SET amount_nanos = amount_nanos + 1")
    connection.close()
    wrong = command_line.run("rollups", "check")
    assert wrong.returncode == 1
    assert "rollup_days is wrong" in wrong.stdout + wrong.stderr
    assert "Counted 10 usage records." in command_line.run("rollups", "rebuild").stderr
    assert command_line.run("rollups", "check").returncode == 0


def test_an_operators_token_is_asked_for_by_name(command_line: CommandLine, account_id: str) -> None:
    assert command_line.run("tokens", "create", "--account", account_id, "--operator").returncode == 0
    with sqlite3.connect(command_line.data_dir / "ledger.db") as connection:
        [(permissions,)] = connection.execute("SELECT permissions FROM api_tokens")
    connection.close()
    assert "operator" in permissions.split()
