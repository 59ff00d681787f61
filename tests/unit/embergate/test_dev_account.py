"""The development account: made once, kept working, stored as a hash."""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path

import pytest

from billing.accounts import AccountDirectory, hash_token
from billing.store import Store
from embergate.dev_account import ensure_dev_account, read_dev_env

URL = "http://127.0.0.1:8787"


@pytest.fixture
def directory(tmp_path: Path) -> Iterator[AccountDirectory]:
    store = Store.open(f"sqlite:///{tmp_path / 'ledger.db'}")
    yield AccountDirectory(store)
    store.close()


def test_the_first_start_makes_an_account_whose_token_only_the_file_has(
    directory: AccountDirectory, tmp_path: Path
) -> None:
    path = tmp_path / "dev.env"
    account = ensure_dev_account(directory, path, URL)
    assert re.fullmatch(r"[0-9a-f]{32}", account.account_id)
    assert path.stat().st_mode & 0o777 == 0o600
    assert read_dev_env(path) == account
    principal = directory.find_principal(hash_token(account.api_token))
    assert principal is not None
    assert principal.account_id == account.account_id
    for file in tmp_path.glob("ledger.db*"):
        assert account.api_token.encode() not in file.read_bytes()


def test_later_starts_change_nothing(directory: AccountDirectory, tmp_path: Path) -> None:
    path = tmp_path / "dev.env"
    first = ensure_dev_account(directory, path, URL)
    stamp = path.stat().st_mtime_ns
    assert ensure_dev_account(directory, path, URL) == first
    assert path.stat().st_mtime_ns == stamp
    assert len(directory.list_accounts()) == 1
    assert len(directory.list_tokens()) == 1


def test_another_port_is_written_down(directory: AccountDirectory, tmp_path: Path) -> None:
    path = tmp_path / "dev.env"
    first = ensure_dev_account(directory, path, URL)
    second = ensure_dev_account(directory, path, "http://127.0.0.1:9000")
    assert second.api_token == first.api_token
    known = read_dev_env(path)
    assert known is not None
    assert known.url == "http://127.0.0.1:9000"


def test_a_revoked_token_is_replaced_in_the_same_account(directory: AccountDirectory, tmp_path: Path) -> None:
    path = tmp_path / "dev.env"
    first = ensure_dev_account(directory, path, URL)
    directory.revoke_token(directory.list_tokens()[0].id)
    second = ensure_dev_account(directory, path, URL)
    assert second.account_id == first.account_id
    assert second.api_token != first.api_token
    assert directory.find_principal(hash_token(second.api_token)) is not None


def test_a_new_database_gets_the_same_account_id(directory: AccountDirectory, tmp_path: Path) -> None:
    path = tmp_path / "dev.env"
    path.write_text(f"EMBERGATE_URL={URL}\nEMBERGATE_ACCOUNT_ID={'a' * 32}\nEMBERGATE_API_TOKEN={'t' * 40}\n")
    account = ensure_dev_account(directory, path, URL)
    assert account.account_id == "a" * 32
    assert account.api_token != "t" * 40


def test_a_torn_file_is_replaced(directory: AccountDirectory, tmp_path: Path) -> None:
    path = tmp_path / "dev.env"
    path.write_text("EMBERGATE_URL=http")
    assert read_dev_env(path) is None
    assert ensure_dev_account(directory, path, URL) == read_dev_env(path)
