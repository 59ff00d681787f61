"""The development account: made at the first start, so that the first request needs no administration.

Its token stands in ``dev.env`` (mode 600) in the data directory and nowhere else:
the store has only the hash.
"""

from __future__ import annotations

from pathlib import Path

import msgspec

from billing.accounts import AccountDirectory, hash_token
from embergate.disk import write_private

ACCOUNT_NAME = "development"
TOKEN_NAME = "development"


class DevAccount(msgspec.Struct, frozen=True):
    """What a client on this machine needs."""

    url: str
    account_id: str
    api_token: str

    def to_env(self) -> str:
        """As lines that a shell can source."""
        return (
            f"EMBERGATE_URL={self.url}\n"
            f"EMBERGATE_ACCOUNT_ID={self.account_id}\n"
            f"EMBERGATE_API_TOKEN={self.api_token}\n"
        )


def read_dev_env(path: Path) -> DevAccount | None:
    """The account in a ``dev.env``, or None when there is none or it is incomplete."""
    try:
        lines = path.read_text().splitlines()
    except FileNotFoundError:
        return None
    values = dict(line.split("=", 1) for line in lines if "=" in line)
    try:
        return DevAccount(
            url=values["EMBERGATE_URL"],
            account_id=values["EMBERGATE_ACCOUNT_ID"],
            api_token=values["EMBERGATE_API_TOKEN"],
        )
    except KeyError:
        return None


def ensure_dev_account(directory: AccountDirectory, path: Path, url: str) -> DevAccount:
    """The development account with a token that works, and ``path`` saying so.

    A new account is made at the first start; a token that the store does not know any more (it was revoked,
    or the database is another one) is replaced.
    """
    known = read_dev_env(path)
    if known is not None:
        principal = directory.find_principal(hash_token(known.api_token))
        if principal is not None and principal.account_id == known.account_id:
            account = DevAccount(url, known.account_id, known.api_token)
            if account != known:
                write_private(path, account.to_env())
            return account
    account_id = known.account_id if known else None
    if account_id is None or directory.find_account(account_id) is None:
        account_id = directory.create_account(ACCOUNT_NAME, account_id).id
    _, secret = directory.issue_token(account_id, TOKEN_NAME)
    account = DevAccount(url, account_id, secret)
    write_private(path, account.to_env())
    return account
