"""What other people's benchmarks count is what the ledger has, token for token, cached ones too."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

from tests.support.client_packages import ClientPackages
from tests.support.installation import ROOT, Installation

NUM_REQUESTS = 12


@pytest.mark.timeout(2400)  # the first run installs more than a gigabyte
@pytest.mark.parametrize("name", ["aiperf", "guidellm"])
def test_a_judge_counts_what_is_billed(
    installation: Installation, judges: ClientPackages, tmp_path: Path, name: str
) -> None:
    program, out = judges.environment(name) / "bin" / name, tmp_path / "verdict.json"
    account = installation.account
    environment = installation.environment | {
        "EMBERGATE_URL": account.url,
        "EMBERGATE_ACCOUNT_ID": account.account_id,
        "EMBERGATE_API_TOKEN": account.api_token,
    }
    command = [
        sys.executable, "-m", "loadtest", "judge", name, "--program", str(program),
        "--tokenizer", str(installation.layout.embedded_checkpoint("kimi")),
        "--max-requests", str(NUM_REQUESTS), "--speed", "16", "--out", str(out),
    ]  # fmt: skip
    done = subprocess.run(
        command, cwd=ROOT, env=environment, capture_output=True, text=True, timeout=360, check=False
    )
    assert done.returncode == 0, done.stdout + done.stderr
    verdict = json.loads(out.read_bytes())
    assert verdict["problems"] == []
    assert (verdict["num_counted"], verdict["num_billed"]) == (NUM_REQUESTS, NUM_REQUESTS)
    assert verdict["counted"] == {
        "prompt_tokens": verdict["billed"]["prompt_tokens"],
        "cached_tokens": verdict["billed"]["cached_tokens"],
        "completion_tokens": verdict["billed"]["completion_tokens"],
    }
    # Conversations grow and share their beginning: a judge that saw nothing cached would prove little.
    assert verdict["counted"]["cached_tokens"] > 0.2 * verdict["counted"]["prompt_tokens"]
