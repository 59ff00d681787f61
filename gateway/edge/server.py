"""The listening socket: hot routes on the lean protocol, everything else on the aiohttp application."""

from __future__ import annotations

from collections.abc import Callable

from aiohttp import web

from gateway.config import GatewayConfig
from gateway.edge.exchange import Handler

HotMatcher = Callable[[str], Handler | None]
"""Given the raw path of a POST, the handler to give it to, or None to leave it to aiohttp."""


class EdgeServer:
    """Serves one address. Hot POSTs go to the handler that ``match`` names, all else to ``app``.

    A connection whose client sends anything but hot requests is handed to aiohttp for good; ``app`` must therefore
    route the hot paths too, through :func:`gateway.edge.aiohttp_exchange.serve_exchange`.
    """

    def __init__(self, config: GatewayConfig, match: HotMatcher, app: web.Application) -> None:
        self._config = config
        self._match = match
        self._app = app

    @property
    def port(self) -> int:
        """The bound port (useful when the configuration said 0)."""
        return self._config.port

    async def start(self) -> None:
        """Bind and listen. Raises OSError when the port is taken."""

    async def stop(self) -> None:
        """Stop accepting, let requests in flight end within ``shutdown_grace_s``, then close what is left."""
