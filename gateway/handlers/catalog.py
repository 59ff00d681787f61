"""What models there are, what they take and what they cost: for SDKs, wrangler, Workers and people."""

from __future__ import annotations

import time
from collections.abc import Mapping
from datetime import UTC, datetime
from uuid import NAMESPACE_URL, uuid5

from aiohttp import web

from billing.rates import NoRateError, RateBook, RateCard
from gateway.auth import Authenticator
from gateway.catalog import Catalog
from gateway.errors import bad_input
from gateway.handlers.enveloped import bare, caller, enveloped
from gateway.wire.catalog import (
    Named,
    Row,
    author_of,
    decode_query,
    distinct,
    list_rows,
    marketplace_row,
    page_of,
    select,
    task_of,
)
from gateway.wire.schemas import schemas_of


class CatalogRoutes:
    """The catalog's routes. Prices are those in force at the moment, for the account that asks."""

    def __init__(
        self,
        catalog: Catalog,
        rate_book: RateBook,
        authenticator: Authenticator,
        *,
        started_at: int,
        takes_batches: bool,
    ) -> None:
        self._catalog = catalog
        self._rate_book = rate_book
        self._authenticator = authenticator
        self._takes_batches = takes_batches
        self._since = datetime.fromtimestamp(started_at, UTC).strftime("%Y-%m-%d %H:%M:%S.000")

    def add_to(self, router: web.UrlDispatcher) -> None:
        """Add the routes."""
        router.add_get("/client/v4/accounts/{account_id}/ai/models/search", self.search)
        router.add_get("/client/v4/accounts/{account_id}/ai/models/schema", self.schema)
        router.add_get("/client/v4/accounts/{account_id}/ai/tasks/search", self.tasks)
        router.add_get("/client/v4/accounts/{account_id}/ai/authors/search", self.authors)
        router.add_get("/client/v4/accounts/{account_id}/ai/finetunes", self.finetunes)
        router.add_get("/client/v4/accounts/{account_id}/ai/finetunes/public", self.finetunes)
        router.add_get("/ai-api/models/search", self.search)

    async def search(self, request: web.Request) -> web.Response:
        """A page of models. Raises Refusal."""
        principal = await caller(self._authenticator, request)
        query = decode_query(request.query)
        rows = select(self._rows(principal.account_id), query, datetime.now(UTC).date())
        page, info = page_of(rows, query)
        if query.format:
            return bare({"data": [marketplace_row(row) for row in page]})
        return enveloped(page, info=info)

    async def schema(self, request: web.Request) -> web.Response:
        """What the model of the query takes and gives. Raises Refusal."""
        await caller(self._authenticator, request)
        name = request.query.get("model")
        if not name:
            raise bad_input("model", "is required")
        return enveloped(schemas_of(self._catalog.find(name)))

    async def tasks(self, request: web.Request) -> web.Response:
        """What the models of this catalog are for. Raises Refusal."""
        await caller(self._authenticator, request)
        return enveloped(distinct(task_of(model) for model in self._catalog.models))

    async def authors(self, request: web.Request) -> web.Response:
        """Whom the models' names name. Raises Refusal."""
        await caller(self._authenticator, request)
        names = sorted({author_of(name) for name in self._catalog.names()} - {""})
        return enveloped([Named(str(uuid5(NAMESPACE_URL, name)), name, "") for name in names])

    async def finetunes(self, request: web.Request) -> web.Response:
        """None: nothing fine-tuned can be uploaded here. Raises Refusal."""
        await caller(self._authenticator, request)
        return enveloped([])

    def _rows(self, account_id: str) -> list[Row]:
        return list_rows(
            self._catalog,
            self._cards(account_id),
            self._rate_book.currency,
            since=self._since,
            takes_batches=self._takes_batches,
        )

    def _cards(self, account_id: str) -> Mapping[str, RateCard]:
        now_us = time.time_ns() // 1000
        cards = {}
        for model in self._catalog.models:
            try:
                cards[model.id] = self._rate_book.card_for(model.id, now_us, account_id)
            except NoRateError:
                continue
        return cards
