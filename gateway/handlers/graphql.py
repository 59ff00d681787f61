"""``POST /client/v4/graphql``: analytics as clients of Workers AI query them."""

from __future__ import annotations

from typing import Any

import msgspec
from aiohttp import web
from sqlalchemy import Connection

from billing.accounts import ANALYTICS_PERMISSION, Principal
from gateway.auth import Authenticator
from gateway.config import AnalyticsConfig
from gateway.errors import Refusal, bad_input, too_large
from gateway.graphql.query import Query
from gateway.reading import UsageReader


class GraphQLRoutes:
    """One route; the account comes from the API token."""

    def __init__(self, authenticator: Authenticator, reader: UsageReader, config: AnalyticsConfig) -> None:
        self._authenticator = authenticator
        self._reader = reader
        self._config = config

    def add_to(self, router: web.UrlDispatcher) -> None:
        """Add the route."""
        router.add_post("/client/v4/graphql", self.query)

    async def query(self, request: web.Request) -> web.Response:
        """Refusals have GraphQL's form too, with their own status."""
        try:
            answer, status = await self._answer(request), 200
        except Refusal as refusal:
            problem = {"message": refusal.message, "extensions": {"code": refusal.reason.word}}
            answer, status = {"data": None, "errors": [problem]}, refusal.reason.status
        return web.Response(status=status, body=msgspec.json.encode(answer), content_type="application/json")

    async def _answer(self, request: web.Request) -> dict[str, Any]:
        principal = await self._authenticator.authenticate(
            request.headers.get("authorization"), "", permission=ANALYTICS_PERMISSION
        )
        query = await self._decoded(request)
        config = self._config
        return await self._reader.read(lambda connection: _run(query, connection, principal, config))

    async def _decoded(self, request: web.Request) -> Query:
        max_bytes = self._config.max_query_bytes
        if (request.content_length or 0) > max_bytes:
            raise too_large(max_bytes)
        body = bytearray()
        async for piece in request.content.iter_any():
            body += piece
            if len(body) > max_bytes:
                raise too_large(max_bytes)
        try:
            return msgspec.json.decode(bytes(body), type=Query)
        except msgspec.DecodeError as error:
            raise bad_input("query", f"the body is no GraphQL request: {error}") from None


def _run(
    query: Query, connection: Connection, principal: Principal, config: AnalyticsConfig
) -> dict[str, Any]:
    """In a reader's thread, where the first query pays for loading the library, and no start of a gateway."""
    from gateway.graphql.executable import Context, run_query

    return run_query(query, Context(connection, principal, config))
