"""Who pays: accounts and their API tokens.

Only the SHA-256 of an API token is stored; the token itself is shown once, when it is issued. It carries 256
random bits, so a plain hash cannot be searched. Ids of accounts are 32 hexadecimal characters, as clients of
Workers AI expect them.
"""

from __future__ import annotations

import hashlib
import hmac
import re
import secrets
import time
from collections.abc import Callable, Sequence
from typing import Any

import msgspec
from sqlalchemy import Connection, Row, bindparam, insert, select, update
from sqlalchemy.exc import IntegrityError

from billing import schema
from billing.store import Store

ANALYTICS_PERMISSION = "analytics:read"
OPERATOR_PERMISSION = "operator"
PERMISSIONS: tuple[str, ...] = ("ai:run", ANALYTICS_PERMISSION)
"""What a customer's token may do."""
ALL_PERMISSIONS = (*PERMISSIONS, OPERATOR_PERMISSION)
"""An operator's token reads the usage of every account."""

TOKEN_PREFIX = "eg_"
MIN_IMPORTED_TOKEN_CHARS = 16

_TOKEN_BY_HASH = select(schema.api_tokens).where(schema.api_tokens.c.token_hash == bindparam("wanted"))
_ACCOUNT_ID = re.compile(r"[0-9a-f]{32}", re.ASCII)
_SECRET = re.compile(r"[\x21-\x7e]+", re.ASCII)
_MAX_NAME_CHARS = 200


class AccountError(ValueError):
    """A request about accounts or API tokens that cannot be met; the message says why."""


class Principal(msgspec.Struct, frozen=True):
    """The authenticated caller."""

    account_id: str
    token_id: str
    permissions: frozenset[str]


class Account(msgspec.Struct, frozen=True, kw_only=True):
    """Who pays. ``created_at_us`` in UTC microseconds."""

    id: str
    name: str
    created_at_us: int


class ApiToken(msgspec.Struct, frozen=True, kw_only=True):
    """What is known about an API token; never the token. ``revoked_at_us`` is None while it is valid."""

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
    """Accounts and API tokens in the store. Thread-safe; a call is one transaction. All raise StoreError."""

    def __init__(self, store: Store, clock: Callable[[], int] = lambda: time.time_ns() // 1_000) -> None:
        """``clock`` returns UTC microseconds."""
        self._store = store
        self._clock = clock

    def create_account(self, name: str, account_id: str | None = None) -> Account:
        """A new account; its id is drawn unless given. Raises AccountError: the id is bad or taken."""
        chosen = secrets.token_hex(16) if account_id is None else account_id
        if _ACCOUNT_ID.fullmatch(chosen) is None:
            raise AccountError(f"account id {chosen!r} is not 32 hexadecimal characters in lower case")
        account = Account(id=chosen, name=_checked_name(name), created_at_us=self._clock())
        try:
            with self._store.writing() as connection:
                connection.execute(insert(schema.accounts), msgspec.structs.asdict(account))
        except IntegrityError:
            raise AccountError(f"account {chosen} exists already") from None
        return account

    def find_account(self, account_id: str) -> Account | None:
        """The account, or None when there is none of this id."""
        with self._store.reading() as connection:
            return _find_account(connection, account_id)

    def list_accounts(self) -> list[Account]:
        """All accounts, oldest first."""
        table = schema.accounts
        with self._store.reading() as connection:
            rows = connection.execute(select(table).order_by(table.c.created_at_us, table.c.id))
            return [Account(**row._mapping) for row in rows]

    def issue_token(
        self, account_id: str, name: str, permissions: Sequence[str] = PERMISSIONS
    ) -> tuple[ApiToken, str]:
        """A new API token and its secret, which cannot be had again. Raises AccountError: no such account."""
        secret = TOKEN_PREFIX + secrets.token_urlsafe(32)
        return self._add_token(account_id, secret, name, permissions), secret

    def import_token(
        self, account_id: str, secret: str, name: str, permissions: Sequence[str] = PERMISSIONS
    ) -> ApiToken:
        """Make an existing secret an API token of the account. To do so again is free.

        Raises:
            AccountError: too short or unprintable, of another account, revoked, or no such account.
        """
        if len(secret) < MIN_IMPORTED_TOKEN_CHARS or _SECRET.fullmatch(secret) is None:
            raise AccountError(
                f"an API token needs at least {MIN_IMPORTED_TOKEN_CHARS} printable ASCII characters"
            )
        try:
            return self._add_token(account_id, secret, name, permissions)
        except IntegrityError:
            existing = self._find_token(hash_token(secret))
        if existing is None or existing.account_id != account_id:
            raise AccountError("this API token belongs to another account")
        if existing.revoked_at_us is not None:
            raise AccountError(f"this API token was revoked (its id is {existing.id}); issue a new one")
        return existing

    def revoke_token(self, token_id: str) -> ApiToken:
        """From now on :meth:`find_principal` refuses it. To do so again is free. Raises AccountError."""
        table = schema.api_tokens
        with self._store.writing() as connection:
            connection.execute(
                update(table)
                .where(table.c.id == token_id, table.c.revoked_at_us.is_(None))
                .values(revoked_at_us=self._clock())
            )
            row = connection.execute(select(table).where(table.c.id == token_id)).one_or_none()
        if row is None:
            raise AccountError(f"there is no API token with id {token_id!r}")
        return _token(row)

    def list_tokens(self, account_id: str | None = None) -> list[ApiToken]:
        """The API tokens of an account, or all, oldest first; revoked ones too."""
        table = schema.api_tokens
        query = select(table).order_by(table.c.created_at_us, table.c.id)
        if account_id is not None:
            query = query.where(table.c.account_id == account_id)
        with self._store.reading() as connection:
            return [_token(row) for row in connection.execute(query)]

    def find_principal(self, token_hash: bytes) -> Principal | None:
        """The caller who shows a token with this hash; None when unknown or revoked. Blocks for one read."""
        token = self._find_token(token_hash)
        if token is None or token.revoked_at_us is not None:
            return None
        return Principal(token.account_id, token.id, frozenset(token.permissions))

    def _add_token(self, account_id: str, secret: str, name: str, permissions: Sequence[str]) -> ApiToken:
        token = ApiToken(
            id=secrets.token_hex(8),
            account_id=account_id,
            name=_checked_name(name),
            permissions=_checked_permissions(permissions),
            created_at_us=self._clock(),
            revoked_at_us=None,
        )
        row = msgspec.structs.asdict(token) | {
            "token_hash": hash_token(secret),
            "permissions": " ".join(token.permissions),
        }
        with self._store.writing() as connection:
            if _find_account(connection, account_id) is None:
                raise AccountError(f"there is no account {account_id!r}")
            connection.execute(insert(schema.api_tokens), row)
        return token

    def _find_token(self, token_hash: bytes) -> ApiToken | None:
        with self._store.reading() as connection:
            row = connection.execute(_TOKEN_BY_HASH, {"wanted": token_hash}).one_or_none()
        # The index compares byte by byte, but only hashes; the last word takes the same time for any.
        if row is None or not hmac.compare_digest(row.token_hash, token_hash):
            return None
        return _token(row)


def _find_account(connection: Connection, account_id: str) -> Account | None:
    row = connection.execute(select(schema.accounts).where(schema.accounts.c.id == account_id)).one_or_none()
    return None if row is None else Account(**row._mapping)


def _token(row: Row[Any]) -> ApiToken:
    return ApiToken(
        id=row.id,
        account_id=row.account_id,
        name=row.name,
        permissions=tuple(row.permissions.split()),
        created_at_us=row.created_at_us,
        revoked_at_us=row.revoked_at_us,
    )


def _checked_name(name: str) -> str:
    if not name or len(name) > _MAX_NAME_CHARS or not name.isprintable():
        raise AccountError(f"a name needs 1 to {_MAX_NAME_CHARS} printable characters")
    return name


def _checked_permissions(permissions: Sequence[str]) -> tuple[str, ...]:
    unknown = sorted(set(permissions) - set(ALL_PERMISSIONS))
    if unknown:
        raise AccountError(f"unknown permission {unknown[0]!r}; known are {', '.join(ALL_PERMISSIONS)}")
    return tuple(sorted(set(permissions)))
