"""``GET /client/v4/accounts/{account}/ai/savings``: what usage cost, and would cost otherwise."""

from __future__ import annotations

import time
from collections.abc import Sequence

from aiohttp import web
from sqlalchemy import Connection

from billing.savings import PriceList, Savings, batch_savings, savings
from gateway.auth import Authenticator
from gateway.config import AnalyticsConfig
from gateway.errors import Reason, Refusal, bad_input
from gateway.handlers.enveloped import enveloped
from gateway.readers import authenticate_reader
from gateway.reading import UsageReader
from gateway.wire.usage_query import decode_usage_query

_FILTERS = ("model", "token", "session", "surface", "since", "until")
_BATCH = "batch"
_MAX_ID_CHARS = 200


class SavingsRoutes:
    """For whoever may read an account's usage. ``lists`` are what the usage is compared with."""

    def __init__(
        self,
        authenticator: Authenticator,
        reader: UsageReader,
        config: AnalyticsConfig,
        lists: Sequence[PriceList],
        currency: str,
    ) -> None:
        self._authenticator = authenticator
        self._reader = reader
        self._config = config
        self._lists = lists
        self._currency = currency

    def add_to(self, router: web.UrlDispatcher) -> None:
        """Add the route."""
        router.add_get("/client/v4/accounts/{account_id}/ai/savings", self.savings)

    async def savings(self, request: web.Request) -> web.Response:
        """Of the usage that the filters leave, or of one batch. Raises Refusal."""
        account_id = request.match_info["account_id"]
        await authenticate_reader(self._authenticator, request.headers.get("authorization"), account_id)
        _check_names(request)
        if _BATCH in request.query:
            return enveloped(await self._of_batch(account_id, request.query[_BATCH]))
        wanted = decode_usage_query(request.query, account_id, self._config, time.time_ns() // 1_000).wanted

        def find(connection: Connection) -> Savings:
            return savings(connection, wanted, self._lists, currency=self._currency)

        return enveloped(await self._reader.read(find))

    async def _of_batch(self, account_id: str, batch_id: str) -> Savings:
        def find(connection: Connection) -> Savings | None:
            return batch_savings(connection, account_id, batch_id, self._lists, currency=self._currency)

        is_possible = len(batch_id) <= _MAX_ID_CHARS and "\x00" not in batch_id
        found = await self._reader.read(find) if is_possible else None
        if found is None:
            raise Refusal(Reason.NOT_FOUND, "There is no such batch.")
        return found


def _check_names(request: web.Request) -> None:
    for name in request.query:
        if name not in (*_FILTERS, _BATCH):
            raise bad_input(name[:50], f"is unknown; known are {', '.join((*_FILTERS, _BATCH))}")
    if _BATCH in request.query and len(request.query) > 1:
        raise bad_input(_BATCH, "stands alone: it goes with no other parameter")
