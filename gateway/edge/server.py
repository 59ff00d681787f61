"""The listening socket: hot routes on the lean protocol, everything else on the aiohttp application."""

from __future__ import annotations

import asyncio
import json
from email.utils import formatdate

from aiohttp import web

from gateway.config import GatewayConfig
from gateway.edge.admission import BodyBudget, EarlyCheck
from gateway.edge.exchange import Headers
from gateway.edge.protocol import LINGER_S, EdgeConnection, EdgeState, HotMatcher, Refusal

_BACKLOG = 2048
_SWEEP_S = 0.5
_FORCED_CLOSE_S = 1.0


def plain_refusal(path: str, status: int, message: str) -> tuple[Headers, bytes]:
    """The default :data:`~gateway.edge.protocol.Refusal`: an OpenAI-form error object."""
    error = {"message": message, "type": "invalid_request_error", "param": None, "code": None}
    return (("content-type", "application/json"),), json.dumps({"error": error}).encode()


class EdgeServer:
    """Serves one address. Hot POSTs go to the handler that ``match`` names, all else to ``app``.

    A connection whose client sends anything but hot requests is handed to aiohttp for good; ``app`` must
    therefore route the hot paths too, through :func:`gateway.edge.aiohttp_exchange.serve_exchange`. ``app``'s
    own start-up and clean-up callbacks run in :meth:`start` and :meth:`stop`. ``refusal`` forms the answers
    that the edge gives by itself (malformed, too large, too slow, too many). ``early_check`` says of large
    requests whether their bodies are worth reading; ``bodies`` is shared with what ``app`` reads.
    """

    def __init__(
        self,
        config: GatewayConfig,
        match: HotMatcher,
        app: web.Application,
        *,
        refusal: Refusal = plain_refusal,
        early_check: EarlyCheck | None = None,
        bodies: BodyBudget | None = None,
    ) -> None:
        self._config = config
        self._early_check = early_check
        self._bodies = bodies or BodyBudget(config.max_buffered_body_bytes)
        self._match = match
        self._refusal = refusal
        self._runner = web.AppRunner(
            app,
            handle_signals=False,
            access_log=None,
            handler_cancellation=True,
            keepalive_timeout=config.keepalive_timeout_s,
            shutdown_timeout=config.shutdown_grace_s,
            lingering_time=LINGER_S,
        )
        self._edge: EdgeState | None = None
        self._server: asyncio.Server | None = None
        self._sweeper: asyncio.TimerHandle | None = None
        self._sweep_s = min(_SWEEP_S, config.read_timeout_s / 4, config.keepalive_timeout_s / 4)

    @property
    def port(self) -> int:
        """The bound port (useful when the configuration said 0)."""
        if self._server is None:
            raise RuntimeError("the server was not started")
        port: int = self._server.sockets[0].getsockname()[1]
        return port

    @property
    def num_connections(self) -> int:
        """Open client connections."""
        return 0 if self._edge is None else len(self._edge.connections)

    async def start(self) -> None:
        """Bind and listen. Raises OSError when the port is taken."""
        await self._runner.setup()
        fallback = self._runner.server
        if fallback is None:
            raise RuntimeError("the aiohttp application did not start")
        edge = self._edge = EdgeState(
            self._config, self._match, self._refusal, fallback, self._early_check, self._bodies
        )
        self._sweep()
        self._server = await edge.loop.create_server(
            lambda: EdgeConnection(edge), self._config.host, self._config.port, backlog=_BACKLOG
        )

    async def stop(self) -> None:
        """Stop accepting, let requests in flight end within ``shutdown_grace_s``, then close what is left."""
        edge = self._edge
        if edge is None:
            await self._runner.cleanup()
            return
        if self._server is not None:
            self._server.close()
        edge.is_stopping = True
        for connection in list(edge.connections):
            connection.close_if_idle()
        if not edge.connections:
            edge.all_closed.set()
        await asyncio.gather(self._runner.cleanup(), self._drain(edge))
        if self._sweeper is not None:
            self._sweeper.cancel()
        self._edge = None

    async def _drain(self, edge: EdgeState) -> None:
        try:
            await asyncio.wait_for(edge.all_closed.wait(), self._config.shutdown_grace_s)
        except TimeoutError:
            for connection in list(edge.connections):
                connection.abort()
        if edge.tasks:  # handlers that saw their client go may still have a record to write
            await asyncio.wait(edge.tasks.values(), timeout=_FORCED_CLOSE_S)
        for task in list(edge.tasks.values()):
            task.cancel()
        if edge.tasks:
            await asyncio.wait(edge.tasks.values(), timeout=_FORCED_CLOSE_S)

    def _sweep(self) -> None:
        """Find connections whose deadline passed: one timer for all is cheaper than one for each."""
        edge = self._edge
        if edge is None:
            return
        now = edge.loop.time()
        edge.date_line = f"date: {formatdate(usegmt=True)}\r\n"
        for connection in [one for one in edge.connections if one.deadline <= now]:
            connection.sweep(now)
        for connection in list(edge.stalled):
            connection.sweep_stalled(now)
        self._sweeper = edge.loop.call_later(self._sweep_s, self._sweep)
