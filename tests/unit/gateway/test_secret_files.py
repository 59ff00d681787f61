"""Server secrets on disk."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from gateway.secret_files import load_or_create


def test_a_secret_is_made_once_and_only_its_owner_may_read_it(tmp_path: Path) -> None:
    directory = tmp_path / "secrets"
    secret = load_or_create(directory, "pool_token")
    assert len(secret) == 64
    assert load_or_create(directory, "pool_token") == secret
    assert load_or_create(directory, "cache_salt_secret") != secret
    assert (directory / "pool_token").stat().st_mode & 0o777 == 0o600
    assert directory.stat().st_mode & 0o777 == 0o700
    assert sorted(path.name for path in directory.iterdir()) == ["cache_salt_secret", "pool_token"]


def test_a_secret_of_the_operators_is_taken_as_it_is(tmp_path: Path) -> None:
    (tmp_path / "pool_token").write_text("mine\n")
    assert load_or_create(tmp_path, "pool_token") == "mine"


def test_starters_at_the_same_time_agree(tmp_path: Path) -> None:
    with ThreadPoolExecutor(16) as threads:
        secrets = set(threads.map(lambda _: load_or_create(tmp_path, "pool_token"), range(64)))
    assert len(secrets) == 1


def test_an_empty_file_is_refused(tmp_path: Path) -> None:
    (tmp_path / "pool_token").write_text("\n")
    with pytest.raises(ValueError, match="pool_token is empty"):
        load_or_create(tmp_path, "pool_token")
