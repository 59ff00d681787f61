"""Runs an exchange handler as an aiohttp route."""

from __future__ import annotations

from aiohttp import web

from gateway.config import GatewayConfig
from gateway.edge.exchange import Handler


async def serve_exchange(request: web.Request, handler: Handler, config: GatewayConfig) -> web.StreamResponse:
    """Read the body, run ``handler`` on an :class:`~gateway.edge.exchange.Exchange` over ``request``, answer it."""
    raise web.HTTPServiceUnavailable
