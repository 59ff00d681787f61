"""``GET /client/v4/accounts/{account}/ai/usage``: what an account used, and what it costs."""

from __future__ import annotations

import time
from typing import Any

import msgspec
from aiohttp import web
from sqlalchemy import Connection

from billing.analytics import WIDTHS_US, UsageFilter, UsageGroup, can_have_latency, latencies, usage_groups
from billing.periods import Period, instant_text
from billing.usage_log import usage_requests
from gateway.auth import Authenticator
from gateway.config import AnalyticsConfig
from gateway.errors import bad_input
from gateway.readers import authenticate_reader
from gateway.reading import UsageReader
from gateway.wire.usage_query import REQUESTS, UsageQuery, decode_usage_query, encode_cursor


class UsageRoutes:
    """The usage API. A customer reads its own account, an operator any."""

    def __init__(
        self, authenticator: Authenticator, reader: UsageReader, config: AnalyticsConfig, currency: str
    ) -> None:
        self._authenticator = authenticator
        self._reader = reader
        self._config = config
        self._currency = currency

    def add_to(self, router: web.UrlDispatcher) -> None:
        """Add the route."""
        router.add_get("/client/v4/accounts/{account_id}/ai/usage", self.usage)

    async def usage(self, request: web.Request) -> web.Response:
        """One page of groups or requests."""
        account_id = request.match_info["account_id"]
        await authenticate_reader(self._authenticator, request.headers.get("authorization"), account_id)
        query = decode_usage_query(request.query, account_id, self._config, time.time_ns() // 1_000)
        body = await self._reader.read(lambda connection: _answer(connection, query, self._currency))
        return web.Response(body=body, content_type="application/json")


def _answer(connection: Connection, query: UsageQuery, currency: str) -> bytes:
    """The envelope of one page."""
    info: dict[str, Any] = {"limit": query.limit, "currency": currency}
    period = query.wanted.period
    if query.by is None:
        assert query.after is None or len(query.after) == 2
        after = None if query.after is None else (int(query.after[0]), str(query.after[1]))
        requests = usage_requests(connection, query.wanted, limit=query.limit, after=after)
        result = [row.as_json() for row in requests.rows]
        cursor = encode_cursor(requests.next_after, query.question)
        info["group_by"] = [REQUESTS]
    else:
        try:
            page = usage_groups(
                connection,
                query.wanted,
                query.by,
                order=query.order,
                limit=query.limit,
                after=query.after,
            )
        except ValueError as error:
            raise bad_input("cursor" if query.after else "group_by", str(error)) from error
        result = _with_latencies(connection, query, page.rows)
        cursor, period = encode_cursor(page.next_after, query.question), page.period
        info["group_by"] = list(query.by)
    info |= {"count": len(result), "cursor": cursor, **_shown(period)}
    return msgspec.json.encode(
        {"result": result, "success": True, "errors": [], "messages": [], "result_info": info}
    )


def _with_latencies(
    connection: Connection, query: UsageQuery, rows: list[UsageGroup]
) -> list[dict[str, Any]]:
    """Rows as they are shown; with percentiles where those are kept for such a grouping."""
    by = query.by or ()
    shown = [row.as_json() for row in rows]
    if not rows or not can_have_latency(query.wanted, by):
        return shown
    found = latencies(connection, _of_page(query.wanted, rows), by)
    for row, fields in zip(rows, shown, strict=True):
        summary = found.get(tuple(row.dimensions[dimension] for dimension in by))
        if summary is not None:
            fields |= msgspec.structs.asdict(summary)
    return shown


def _of_page(wanted: UsageFilter, rows: list[UsageGroup]) -> UsageFilter:
    """The filter, narrowed to the times that the rows are about."""
    for dimension, width_us in WIDTHS_US.items():
        if dimension in rows[0].dimensions:
            starts = [int(row.dimensions[dimension]) for row in rows]
            first, last = min(starts), max(starts) + width_us
            start_us = max(first, wanted.period.start_us or 0)
            end_us = last if wanted.period.end_us is None else min(last, wanted.period.end_us)
            return msgspec.structs.replace(wanted, period=Period(start_us, end_us))
    return wanted


def _shown(period: Period) -> dict[str, str | None]:
    return {
        "since": None if period.start_us is None else instant_text(period.start_us),
        "until": None if period.end_us is None else instant_text(period.end_us),
    }
