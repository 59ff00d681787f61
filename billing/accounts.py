"""Who pays: accounts and their API tokens.

Only the SHA-256 of an API token is stored; the token itself is returned once, when it is issued. Ids of
accounts are 32 hexadecimal characters, as clients of Workers AI expect them.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING

import msgspec

if TYPE_CHECKING:
    from billing.store import Store

PERMISSIONS: tuple[str, ...] = ("ai:run", "analytics:read")


class AccountError(ValueError):
    """A request about accounts or tokens that cannot be met; the message says why."""


class Principal(msgspec.Struct, frozen=True):
    """The authenticated caller."""

    account_id: str
    token_id: str
    permissions: frozenset[str]


class Account(msgspec.Struct, frozen=True, kw_only=True):
    id: str
    name: str
    created_at_us: int


class ApiToken(msgspec.Struct, frozen=True, kw_only=True):
    """What is known about an API token; never the token. ``revoked_at_us`` null while it is valid."""

    id: str
    account_id: str
    name: str
    permissions: tuple[str, ...]
    created_at_us: int
    revoked_at_us: int | None


def hash_token(secret: str) -> bytes:
    """The 32 bytes by which an API token is stored and looked up."""
    return hashlib.sha256(secret.encode("utf-8", "surrogatepass")).digest()


class AccountDirectory:
    """Accounts and API tokens in the store. Thread-safe. ``clock`` returns UTC microseconds."""

    def __init__(self, store: Store, clock: Callable[[], int] | None = None) -> None:
        raise NotImplementedError

    def create_account(self, name: str, account_id: str | None = None) -> Account:
        """A new account; its id is drawn at random unless given. Raises AccountError when the id is bad or taken."""
        raise NotImplementedError

    def find_account(self, account_id: str) -> Account | None:
        raise NotImplementedError

    def list_accounts(self) -> list[Account]:
        raise NotImplementedError

    def issue_token(self, account_id: str, name: str,
                    permissions: Sequence[str] = PERMISSIONS) -> tuple[ApiToken, str]:
        """A new API token and its secret, which cannot be had again. Raises AccountError: no such account."""
        raise NotImplementedError

    def import_token(self, account_id: str, secret: str, name: str,
                     permissions: Sequence[str] = PERMISSIONS) -> ApiToken:
        """Make an existing secret valid for the account; again is free.

        Raises AccountError when it is too short, belongs to another account or was revoked.
        """
        raise NotImplementedError

    def revoke_token(self, token_id: str) -> ApiToken:
        """From now on ``find_principal`` refuses it; again is free. Raises AccountError: no such token."""
        raise NotImplementedError

    def list_tokens(self, account_id: str | None = None) -> list[ApiToken]:
        raise NotImplementedError

    def find_principal(self, token_hash: bytes) -> Principal | None:
        """The caller who shows a token with this hash; None when unknown or revoked. Blocking: one indexed read."""
        raise NotImplementedError
