"""The receipt of a cached request, checked by a program that has only public key, tokenizer and request."""

from __future__ import annotations

import json
import subprocess
import sys
import time
import urllib.error
import urllib.request
from pathlib import Path
from typing import Any

import pytest

from tests.support.installation import MODEL, ROOT, Installation

pytestmark = [pytest.mark.e2e, pytest.mark.model, pytest.mark.slow]

BODY = {
    "messages": [
        {"role": "system", "content": "You are a patient librarian. " * 40},
        {"role": "user", "content": "Where are the atlases? (“Karten”, 地図)"},
    ],
    "max_tokens": 8,
    "temperature": 0,
}
COUNTS = ("prompt_tokens", "cached_prompt_tokens", "completion_tokens", "amount_nanos")


def call(installation: Installation, path: str, body: Any = None) -> tuple[Any, str]:
    """An answer decoded, and the id of its request."""
    account = installation.account
    request = urllib.request.Request(
        f"{account.url}{path}",
        data=None if body is None else json.dumps(body).encode(),
        headers={"authorization": f"Bearer {account.api_token}", "content-type": "application/json"},
    )
    with urllib.request.urlopen(request, timeout=120) as response:
        return json.load(response), response.headers.get("cf-ai-req-id", "")


class Case:
    """Three files, as a customer would have them, and the tokenizer."""

    def __init__(self, directory: Path, installation: Installation) -> None:
        account = f"/client/v4/accounts/{installation.account.account_id}/ai"
        for _ in range(2):
            self.answer, request_id = call(installation, f"{account}/run/{MODEL}", BODY)
        self.document = self._receipt(installation, f"{account}/usage/{request_id}")
        self.receipt_file = directory / "receipt.json"
        self.keys_file = directory / "jwks.json"
        self.request_file = directory / "request.json"
        self.tokenizer = installation.layout.embedded_checkpoint("kimi")
        self.keys_file.write_text(json.dumps(call(installation, "/.well-known/jwks.json")[0]))
        self.write(self.document, BODY)

    def _receipt(self, installation: Installation, path: str) -> Any:
        deadline = time.monotonic() + 20
        while True:
            try:
                return call(installation, path)[0]
            except urllib.error.HTTPError as error:
                if error.code != 404 or time.monotonic() > deadline:
                    raise
                time.sleep(0.05)

    def write(self, document: Any, body: Any) -> None:
        self.receipt_file.write_text(json.dumps(document))
        self.request_file.write_text(json.dumps(body))

    def check_alone(self) -> subprocess.CompletedProcess[str]:
        """By the program that shares nothing with the service, where it cannot import any of it."""
        files = (self.receipt_file, self.keys_file, self.request_file, self.tokenizer)
        return subprocess.run(
            [sys.executable, "-I", str(ROOT / "examples/verify_receipt.py"), *map(str, files)],
            capture_output=True, text=True, timeout=60, check=False, cwd=self.receipt_file.parent,
        )  # fmt: skip

    def check_by_command(self, installation: Installation) -> subprocess.CompletedProcess[str]:
        return installation.run(
            "receipts", "verify", str(self.receipt_file), "--keys", str(self.keys_file),
            "--request", str(self.request_file), "--tokenizer", str(self.tokenizer),
        )  # fmt: skip


@pytest.fixture(scope="module")
def case(installation: Installation, tmp_path_factory: pytest.TempPathFactory) -> Case:
    return Case(tmp_path_factory.mktemp("receipt"), installation)


def test_a_cached_request_is_proved_to_the_last_block(installation: Installation, case: Case) -> None:
    case.write(case.document, BODY)
    receipt = case.document["result"]["receipt"]
    usage = case.answer["result"]["usage"]
    assert receipt["cached_prompt_tokens"] == usage["prompt_tokens_details"]["cached_tokens"] > 100
    alone = case.check_alone()
    assert alone.returncode == 0, alone.stdout + alone.stderr
    assert "the cached blocks are those of this prompt" in alone.stdout
    by_command = case.check_by_command(installation)
    assert by_command.returncode == 0, by_command.stdout + by_command.stderr
    assert "the counts of the prompt are right" in by_command.stdout


@pytest.mark.parametrize("count", COUNTS)
def test_a_receipt_with_one_changed_count_fails(installation: Installation, case: Case, count: str) -> None:
    changed = json.loads(json.dumps(case.document))
    changed["result"]["receipt"][count] -= 1
    case.write(changed, BODY)
    assert case.check_alone().returncode == 1
    by_command = case.check_by_command(installation)
    assert by_command.returncode == 1
    assert "the signature does not belong to this receipt" in by_command.stdout


def test_another_request_of_the_same_length_fails(installation: Installation, case: Case) -> None:
    system, user = BODY["messages"]  # type: ignore[misc]
    content = system["content"].replace("patient", "certain")  # type: ignore[index]
    case.write(case.document, {**BODY, "messages": [{"role": "system", "content": content}, user]})
    assert "WRONG: the cached blocks are those of this prompt" in case.check_alone().stderr
    by_command = case.check_by_command(installation)
    assert "the cached blocks are not those of this request's prompt" in by_command.stdout


def test_a_replaced_key_leaves_old_receipts_valid(installation: Installation, case: Case) -> None:
    assert installation.run("receipts", "rotate").returncode == 0
    case.write(case.document, BODY)
    case.keys_file.write_text(json.dumps(call(installation, "/.well-known/jwks.json")[0]))
    assert case.check_alone().returncode == 0
    path = f"/client/v4/accounts/{installation.account.account_id}/ai/usage/"
    again, _ = call(installation, path + case.document["result"]["receipt"]["request_id"])
    assert again["result"]["receipt"] == case.document["result"]["receipt"]
    assert again["result"]["signature"]["key_id"] != case.document["result"]["signature"]["key_id"]
    assert installation.run("audit").returncode == 0
