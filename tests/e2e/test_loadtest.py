"""Views from outside hold against a real installation: replay counts exactly, bills agree, locust judges."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

from loadtest.replay.trace import read_trace
from tests.support.installation import ROOT, Installation
from tests.support.settled import settled_usage

pytestmark = [pytest.mark.e2e, pytest.mark.slow, pytest.mark.model]


def run(installation: Installation, *command: str) -> subprocess.CompletedProcess[str]:
    account = installation.account
    environment = installation.environment | {
        "EMBERGATE_URL": account.url,
        "EMBERGATE_ACCOUNT_ID": account.account_id,
        "EMBERGATE_API_TOKEN": account.api_token,
    }
    return subprocess.run(
        [sys.executable, "-m", *command],
        cwd=ROOT, env=environment, capture_output=True, text=True, timeout=240, check=False,
    )  # fmt: skip


def test_a_replay_is_counted_as_it_was_made_and_shares_what_the_trace_shares(
    installation: Installation, tmp_path: Path
) -> None:
    out = tmp_path / "replay.json"
    done = run(
        installation, "loadtest", "replay", "--max-requests", "8", "--length", "0.03125", "--speed", "8",
        "--out", str(out),
    )  # fmt: skip
    assert done.returncode == 0, done.stdout + done.stderr
    report = json.loads(out.read_bytes())
    assert (report["num_requests"], report["miscounted"], report["errors"]) == (8, 0, {})
    # Each of two replicas has to compute what all share once; one pool without end would only once.
    assert (
        0.5 * report["ideal_cached_tokens"] < report["cached_tokens"] <= report["ideal_cached_tokens"] + 128
    )


def test_a_client_is_billed_for_what_it_counts(installation: Installation) -> None:
    done = run(
        installation,
        "loadtest",
        "bill-check",
        "--requests",
        "40",
        "--max-tokens",
        "8",
        "--disconnects",
        "0.3",
    )
    assert done.returncode == 0, done.stdout + done.stderr
    assert "0 differences in 40 requests" in done.stdout


def test_locust_counts_what_it_sends_and_sets_the_exit_code(installation: Installation) -> None:
    common = ("locust", "-f", "loadtest/locustfile.py", "--headless", "--only-summary", "--host",
              installation.url, "--users", "2", "--spawn-rate", "2", "--run-time", "5s",
              "--stop-timeout", "60", "--max-tokens", "6", "Chat")  # fmt: skip
    good = run(installation, *common)
    assert good.returncode == 0, good.stdout + good.stderr
    assert "TTFT" in good.stdout + good.stderr
    strict = run(installation, *common, "--max-ttft-p95", "0.001")
    assert strict.returncode == 1
    assert "MISSED TTFT" in strict.stdout + strict.stderr


def test_usage_is_recorded_as_a_trace_that_can_be_read_again(
    installation: Installation, tmp_path: Path
) -> None:
    account_id, path = installation.account.account_id, tmp_path / "trace.jsonl"
    for whose in ((), ("--account", account_id)):  # other tests may have served other accounts here
        total = settled_usage(installation, *whose)["total"]
        done = installation.run("trace", "record", "--out", str(path), "--block-tokens", "16", *whose)
        assert done.returncode == 0, done.stderr
        entries = read_trace(path, 16, 100_000)
        assert sum(entry.output_length for entry in entries) == total["completion_tokens"] > 0
        assert account_id not in path.read_text()
