"""Who an API token belongs to: what SDKs and wrangler ask before they do anything else."""

from __future__ import annotations

import asyncio
from collections.abc import Callable

import msgspec
from aiohttp import web

from billing.accounts import Account, Principal
from billing.store import StoreError
from gateway.auth import Authenticator
from gateway.errors import Reason, Refusal, accounts_unavailable
from gateway.handlers.enveloped import caller, enveloped
from gateway.wire.catalog import Query, decode_query, page_of

_ACTIVE = (10000, "This API Token is valid and active")


class _TokenStatus(msgspec.Struct, frozen=True):
    id: str
    status: str = "active"


class _Account(msgspec.Struct, frozen=True):
    id: str
    name: str
    type: str = "standard"


class _Membership(msgspec.Struct, frozen=True):
    id: str
    account: _Account
    roles: list[str] = []
    status: str = "accepted"


class IdentityRoutes:
    """Tokens and accounts as their owners see them. ``find_account`` blocks, and raises StoreError."""

    def __init__(self, authenticator: Authenticator, find_account: Callable[[str], Account | None]) -> None:
        self._authenticator = authenticator
        self._find_account = find_account

    def add_to(self, router: web.UrlDispatcher) -> None:
        """Add the routes."""
        router.add_get("/client/v4/user/tokens/verify", self.verify)
        router.add_get("/client/v4/accounts/{account_id}/tokens/verify", self.verify)
        router.add_get("/client/v4/user", self.user)
        router.add_get("/client/v4/accounts", self.accounts)
        router.add_get("/client/v4/accounts/{account_id}", self.account)
        router.add_get("/client/v4/memberships", self.memberships)

    async def verify(self, request: web.Request) -> web.Response:
        """The token is valid; a user's and an account's are one kind here. Raises Refusal."""
        try:
            principal = await caller(self._authenticator, request)
        except Refusal as refusal:
            if refusal.reason is not Reason.AUTHENTICATION:
                raise
            raise Refusal(Reason.INVALID_TOKEN, "Invalid API Token") from None
        return enveloped(_TokenStatus(principal.token_id), message=_ACTIVE)

    async def user(self, request: web.Request) -> web.Response:
        """Nobody: tokens belong to accounts. Raises Refusal, in the form that wrangler understands."""
        await caller(self._authenticator, request)
        raise Refusal(Reason.NO_USER, "Unauthorized to access requested resource: the token is an account's")

    async def accounts(self, request: web.Request) -> web.Response:
        """The one account of the token, as a list with pages. Raises Refusal."""
        query, account = decode_query(request.query), await self._account_of(request)
        return _page([account], query)

    async def account(self, request: web.Request) -> web.Response:
        """The account that the path names. Raises Refusal."""
        return enveloped(await self._account_of(request))

    async def memberships(self, request: web.Request) -> web.Response:
        """The token's account once more, as something to belong to. Raises Refusal."""
        query, account = decode_query(request.query), await self._account_of(request)
        return _page([_Membership(account.id, account)], query)

    async def _account_of(self, request: web.Request) -> _Account:
        principal: Principal = await caller(self._authenticator, request)
        try:
            account = await asyncio.to_thread(self._find_account, principal.account_id)
        except StoreError as error:
            raise accounts_unavailable() from error
        return _Account(principal.account_id, "" if account is None else account.name)


def _page(items: list[_Account] | list[_Membership], query: Query) -> web.Response:
    page, info = page_of(items, query)
    return enveloped(page, info=info)
