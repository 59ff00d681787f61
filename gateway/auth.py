"""Who is calling: API token -> Principal, and what follows from the account.

Tokens are looked up by their SHA-256, so no comparison of secrets leaks its progress in time. Answers of the
directory, also negative ones, are kept for ``cache_ttl_s``: that is how long a revoked token can still be
used. Entries in the second half of their life are renewed in the background, so that requests rarely wait for
it.
"""

from __future__ import annotations

import asyncio
import hmac
import logging
from collections import OrderedDict
from collections.abc import Callable
from functools import lru_cache
from typing import Protocol

from billing.accounts import Principal, hash_token
from billing.store import StoreError
from gateway.config import AuthConfig
from gateway.errors import Reason, Refusal, accounts_unavailable, unauthenticated
from gateway.framing import framed

_log = logging.getLogger(__name__)

RUN_PERMISSION = "ai:run"
_MAX_RECENT_SALTS = 4096
_SALT_DOMAIN = b"embergate prefix cache salt v1"


class PrincipalDirectory(Protocol):
    """Where principals are looked up; blocking."""

    def find_principal(self, token_hash: bytes) -> Principal | None:
        """The caller who shows a token with this hash; None when unknown or revoked. Raises StoreError."""


class _Entry:
    __slots__ = ("expires_at", "principal")

    def __init__(self, principal: Principal | None, expires_at: float) -> None:
        self.principal = principal
        self.expires_at = expires_at


class Authenticator:
    """Checks bearer tokens against a directory, through a bounded cache. Belongs to one event loop."""

    def __init__(self, directory: PrincipalDirectory, config: AuthConfig, clock: Callable[[], float]) -> None:
        self._directory = directory
        self._config = config
        self._clock = clock
        self._cache: OrderedDict[bytes, _Entry] = OrderedDict()
        self._lookups: dict[bytes, asyncio.Task[Principal | None]] = {}

    async def authenticate(
        self, authorization: str | None, account_id: str, *, permission: str = RUN_PERMISSION
    ) -> Principal:
        """The caller, who must belong to the account that the path names; "" stands for the token's own.

        An empty ``permission`` admits every valid token.

        Raises:
            Refusal: 401 when there is no valid token of this account; 403 when it lacks the permission; 503
                when the directory cannot say.
        """
        secret = _bearer_token(authorization)
        if secret is None:
            raise unauthenticated()
        token_hash = hash_token(secret)
        entry = self._recall(token_hash)
        principal = await self._find(token_hash) if entry is None else entry.principal
        if principal is None or not (account_id == "" or _is_of(principal, account_id)):
            raise unauthenticated()
        if permission and permission not in principal.permissions:
            raise Refusal(Reason.NOT_PERMITTED, f"The API token lacks the permission {permission}")
        return principal

    async def recognize(self, token_hash: bytes) -> Principal | None:
        """The caller whose API token has this hash; None when it is unknown or revoked.

        Raises:
            Refusal: 503 when the directory cannot say.
        """
        return await self._find(token_hash)

    def _recall(self, token_hash: bytes) -> _Entry | None:
        """What is known and still holds; renewed in the background when it is half as old as it may get."""
        entry = self._cache.get(token_hash)
        if entry is None:
            return None
        remaining = entry.expires_at - self._clock()
        if remaining <= 0:
            return None
        if remaining < self._config.cache_ttl_s / 2:
            self._look_up(token_hash)
        return entry

    async def _find(self, token_hash: bytes) -> Principal | None:
        entry = self._recall(token_hash)
        if entry is not None:
            return entry.principal
        try:
            return await asyncio.shield(self._look_up(token_hash))
        except StoreError as error:
            _log.warning("an API token could not be looked up: %s", error)
            raise accounts_unavailable() from error

    def _look_up(self, token_hash: bytes) -> asyncio.Task[Principal | None]:
        """One look-up per token at a time, whoever asks."""
        lookup = self._lookups.get(token_hash)
        if lookup is None:
            lookup = asyncio.ensure_future(self._fetch(token_hash))
            self._lookups[token_hash] = lookup
            lookup.add_done_callback(lambda done: self._forget(token_hash, done))
        return lookup

    def _forget(self, token_hash: bytes, lookup: asyncio.Task[Principal | None]) -> None:
        del self._lookups[token_hash]
        if not lookup.cancelled():
            lookup.exception()  # retrieved: a failed renewal shows at the next look-up that is waited for

    async def _fetch(self, token_hash: bytes) -> Principal | None:
        asked_at = self._clock()  # the answer may already be this old when it comes
        principal = await asyncio.to_thread(self._directory.find_principal, token_hash)
        self._cache.pop(token_hash, None)
        self._cache[token_hash] = _Entry(principal, asked_at + self._config.cache_ttl_s)
        while len(self._cache) > self._config.max_cached_tokens:
            self._cache.popitem(last=False)
        return principal


def _is_of(principal: Principal, account_id: str) -> bool:
    return hmac.compare_digest(principal.account_id.encode(), account_id.encode("utf-8", "surrogatepass"))


def _bearer_token(authorization: str | None) -> str | None:
    if authorization is None:
        return None
    scheme, _, secret = authorization.partition(" ")
    secret = secret.strip()
    return secret if scheme.lower() == "bearer" and secret else None


class SaltMaker:
    """Derives the root of an account's block hashes, so that no account can observe another's prefix
    cache.
    """

    def __init__(self, secret: str) -> None:
        self._secret = secret.encode()
        self._recent = lru_cache(_MAX_RECENT_SALTS)(self._derive)

    def salt_for(self, account_id: str) -> str:
        """64 hexadecimal characters; the same for an account for as long as the server secret lives."""
        return self._recent(account_id)

    def _derive(self, account_id: str) -> str:
        return hmac.digest(self._secret, framed(_SALT_DOMAIN, account_id.encode()), "sha256").hex()
