from __future__ import annotations

import re

import pytest
from sqlalchemy import select

from billing import schema
from billing.accounts import PERMISSIONS, AccountDirectory, AccountError, Principal, hash_token
from billing.store import Store
from tests.support.ledger import ACCOUNT, OTHER_ACCOUNT

SECRET = "a-secret-from-elsewhere-0123456789"


class Clock:
    def __init__(self) -> None:
        self.now_us = 1_000

    def __call__(self) -> int:
        self.now_us += 1
        return self.now_us


@pytest.fixture
def accounts(store: Store) -> AccountDirectory:
    return AccountDirectory(store, clock=Clock())


class TestAccounts:
    def test_an_id_is_drawn_unless_given(self, accounts: AccountDirectory) -> None:
        drawn = accounts.create_account("Third")
        assert re.fullmatch(r"[0-9a-f]{32}", drawn.id)
        given = accounts.create_account("Fourth", "a" * 32)
        assert accounts.find_account("a" * 32) == given
        assert [account.name for account in accounts.list_accounts()][:2] == ["Third", "Fourth"]

    def test_a_taken_id_is_refused(self, accounts: AccountDirectory) -> None:
        with pytest.raises(AccountError, match="exists already"):
            accounts.create_account("Again", ACCOUNT)

    @pytest.mark.parametrize("account_id", ["", "short", "A" * 32, "g" * 32, "a" * 33, "a" * 31 + "\n"])
    def test_a_bad_id_is_refused(self, accounts: AccountDirectory, account_id: str) -> None:
        with pytest.raises(AccountError, match="32 hexadecimal"):
            accounts.create_account("Bad", account_id)

    @pytest.mark.parametrize("name", ["", "x" * 201, "two\nlines"])
    def test_a_bad_name_is_refused(self, accounts: AccountDirectory, name: str) -> None:
        with pytest.raises(AccountError, match="a name needs"):
            accounts.create_account(name)

    def test_an_unknown_account_is_none(self, accounts: AccountDirectory) -> None:
        assert accounts.find_account("0" * 32) is None


class TestTokens:
    def test_an_issued_token_opens_its_account(self, accounts: AccountDirectory) -> None:
        token, secret = accounts.issue_token(ACCOUNT, "laptop")
        assert secret.startswith("eg_")
        assert len(secret) > 40
        assert accounts.find_principal(hash_token(secret)) == Principal(
            ACCOUNT, token.id, frozenset(PERMISSIONS)
        )

    def test_other_tokens_open_nothing(self, accounts: AccountDirectory) -> None:
        _, secret = accounts.issue_token(ACCOUNT, "laptop")
        for wrong in ("", secret + "x", secret[:-1], "eg_", "\udcff"):
            assert accounts.find_principal(hash_token(wrong)) is None

    def test_a_revoked_token_opens_nothing_at_once(self, accounts: AccountDirectory) -> None:
        token, secret = accounts.issue_token(ACCOUNT, "laptop")
        revoked = accounts.revoke_token(token.id)
        assert revoked.revoked_at_us is not None
        assert accounts.find_principal(hash_token(secret)) is None
        assert accounts.revoke_token(token.id) == revoked

    def test_revoking_one_leaves_the_others(self, accounts: AccountDirectory) -> None:
        first, _ = accounts.issue_token(ACCOUNT, "first")
        second, secret = accounts.issue_token(ACCOUNT, "second")
        accounts.revoke_token(first.id)
        found = accounts.find_principal(hash_token(secret))
        assert found is not None
        assert found.token_id == second.id

    def test_an_unknown_token_cannot_be_revoked(self, accounts: AccountDirectory) -> None:
        with pytest.raises(AccountError, match="no API token with id 'x'"):
            accounts.revoke_token("x")

    def test_the_secret_is_nowhere_in_the_database(self, accounts: AccountDirectory, store: Store) -> None:
        _, secret = accounts.issue_token(ACCOUNT, "laptop")
        accounts.import_token(ACCOUNT, SECRET, "from elsewhere")
        with store.reading() as connection:
            rows = [
                tuple(row)
                for table in schema.metadata.sorted_tables
                for row in connection.execute(select(table))
            ]
        assert any(hash_token(secret) in row for row in rows)
        assert secret not in repr(rows)
        assert SECRET not in repr(rows)

    def test_permissions_are_kept(self, accounts: AccountDirectory) -> None:
        _, secret = accounts.issue_token(ACCOUNT, "reader", ["analytics:read"])
        found = accounts.find_principal(hash_token(secret))
        assert found is not None
        assert found.permissions == {"analytics:read"}
        with pytest.raises(AccountError, match="unknown permission 'root'"):
            accounts.issue_token(ACCOUNT, "mighty", ["ai:run", "root"])

    def test_no_account_no_token(self, accounts: AccountDirectory) -> None:
        with pytest.raises(AccountError, match="there is no account"):
            accounts.issue_token("0" * 32, "laptop")
        with pytest.raises(AccountError, match="there is no account"):
            accounts.import_token("0" * 32, SECRET, "laptop")

    def test_lists_by_account(self, accounts: AccountDirectory) -> None:
        first, _ = accounts.issue_token(ACCOUNT, "first")
        second, _ = accounts.issue_token(OTHER_ACCOUNT, "second")
        assert accounts.list_tokens(ACCOUNT) == [first]
        assert accounts.list_tokens() == [first, second]


class TestImport:
    def test_an_imported_token_opens_its_account(self, accounts: AccountDirectory) -> None:
        token = accounts.import_token(ACCOUNT, SECRET, "development")
        found = accounts.find_principal(hash_token(SECRET))
        assert found is not None
        assert (found.account_id, found.token_id) == (ACCOUNT, token.id)

    def test_again_is_free(self, accounts: AccountDirectory) -> None:
        token = accounts.import_token(ACCOUNT, SECRET, "development")
        assert accounts.import_token(ACCOUNT, SECRET, "again") == token
        assert accounts.list_tokens() == [token]

    def test_never_for_a_second_account(self, accounts: AccountDirectory) -> None:
        accounts.import_token(ACCOUNT, SECRET, "development")
        with pytest.raises(AccountError, match="another account"):
            accounts.import_token(OTHER_ACCOUNT, SECRET, "development")

    def test_a_revoked_one_does_not_come_back(self, accounts: AccountDirectory) -> None:
        token = accounts.import_token(ACCOUNT, SECRET, "development")
        accounts.revoke_token(token.id)
        with pytest.raises(AccountError, match="was revoked"):
            accounts.import_token(ACCOUNT, SECRET, "development")

    @pytest.mark.parametrize(
        "secret", ["", "short", "has spaces in it, and is long", "ümläuts-are-not-ascii"]
    )
    def test_a_weak_or_unprintable_one_is_refused(self, accounts: AccountDirectory, secret: str) -> None:
        with pytest.raises(AccountError, match="at least 16 printable"):
            accounts.import_token(ACCOUNT, secret, "development")
