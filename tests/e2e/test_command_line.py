"""The command line against what runs."""

from __future__ import annotations

import re
import shlex
import subprocess
import sys

import pytest

from embergate.commands.up import first_request
from tests.support.installation import ALIAS, EMBEDDINGS, MODEL, ROOT, Installation
from tests.support.settled import settled_usage

pytestmark = [pytest.mark.e2e, pytest.mark.model, pytest.mark.slow]


def test_status_shows_four_ready_processes(installation: Installation) -> None:
    done = installation.run("status")
    assert done.returncode == 0
    ready = re.findall(r"^(\S+) +ready ", done.stdout, re.MULTILINE)
    assert ready == ["gateway", "replica-0", "replica-1", "embeddings-0"]
    state = installation.run_json("status")
    assert state["phase"] == "ready"
    assert [process["num_restarts"] for process in state["processes"]] == [0, 0, 0, 0]


def test_a_second_up_is_refused_with_the_way_out(installation: Installation) -> None:
    done = installation.run("up")
    assert done.returncode == 1
    assert "already runs" in done.stderr
    assert "make down" in done.stderr
    assert installation.run("status").returncode == 0


def test_the_development_account_is_private_and_works_when_sourced(installation: Installation) -> None:
    assert installation.layout.dev_env.stat().st_mode & 0o777 == 0o600
    script = (
        f". {shlex.quote(str(installation.layout.dev_env))}; "
        'curl -sS "$EMBERGATE_URL/client/v4/accounts/$EMBERGATE_ACCOUNT_ID/ai/run/@cf/moonshotai/kimi-k2.5"'
        ' -H "Authorization: Bearer $EMBERGATE_API_TOKEN" -d \'{"prompt": "Hello", "max_tokens": 2}\''
    )
    done = subprocess.run(["sh", "-c", script], capture_output=True, text=True, timeout=60, check=False)
    assert '"success":true' in done.stdout, done.stdout + done.stderr


def test_the_request_that_up_prints_gets_a_sensible_answer(installation: Installation) -> None:
    script = first_request(installation.account, MODEL)
    for _ in range(2):
        done = subprocess.run(["sh", "-c", script], capture_output=True, text=True, timeout=60, check=False)
        assert "The capital of France is Paris." in done.stdout, done.stdout + done.stderr


def test_the_secrets_are_private(installation: Installation) -> None:
    secrets = list(installation.layout.secrets_dir.iterdir())
    assert secrets
    assert {path.stat().st_mode & 0o777 for path in secrets} == {0o600}


def test_logs_name_their_process_and_hold_no_prompt_and_no_token(installation: Installation) -> None:
    done = installation.run("logs", "-n", "1000")
    assert done.returncode == 0
    names = {line.split("|")[0].strip() for line in done.stdout.splitlines()}
    assert {"gateway", "replica-0", "replica-1", "supervisor"} <= names
    assert installation.account.api_token not in done.stdout
    assert "capital of France" not in done.stdout
    assert installation.run("logs", "nobody").returncode == 1


def test_models_lists_the_catalog(installation: Installation) -> None:
    rows = {row["id"]: row for row in installation.run_json("models", "list")}
    row = rows.pop(MODEL)
    assert ALIAS in row["aliases"]
    assert row["state"] == "ready"
    assert row["replicas"] == ["replica-0", "replica-1"]
    assert rows.pop(EMBEDDINGS)["replicas"] == ["embeddings-0"]
    assert rows
    assert all(other["replicas"] == [] for other in rows.values())


def test_the_bill_adds_up(installation: Installation) -> None:
    bill = installation.run_json("statement")
    assert bill["account_id"] == installation.account.account_id
    assert sum(line["amount_nanos"] for line in bill["lines"]) == bill["amount_nanos"]
    assert installation.run("statement", "--month", "2026-13").returncode == 1
    assert installation.run("statement", "--account", "f" * 32).returncode == 1


@pytest.mark.parametrize("by", ["model", "session", "day", "account", "request"])
def test_usage_sums_to_the_same_total_however_it_is_grouped(installation: Installation, by: str) -> None:
    answer = settled_usage(installation, "--by", by, "--since", "7d")
    assert sum(row["amount_nanos"] for row in answer["rows"]) == answer["total"]["amount_nanos"]
    assert installation.run("usage", "--by", by).returncode == 0


def test_the_example_of_two_turns_shows_cached_tokens(installation: Installation) -> None:
    account = installation.account
    done = subprocess.run(
        [sys.executable, str(ROOT / "examples" / "two_turns.py")],
        env={
            "EMBERGATE_URL": account.url,
            "EMBERGATE_ACCOUNT_ID": account.account_id,
            "EMBERGATE_API_TOKEN": account.api_token,
        },
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    first, second = re.findall(r"prompt (\d+) tokens, (\d+) of them cached", done.stdout)
    assert int(first[1]) == 0
    assert int(second[0]) > 300
    assert int(second[1]) > 300
