"""The part of a replica that exchanges blocks with others, built when its engine is ready."""

from __future__ import annotations

import asyncio
from typing import Protocol

from backend.config import BackendConfig
from backend.engine.messages import ExchangeInfo
from backend.transfer.counters import TransferCounters
from backend.transfer.desk import Desk, ExchangePort
from backend.transfer.exchange import open_exchange
from backend.transfer.fetching import Fetcher
from backend.transfer.serving import PrefillServer, PromptEngine

_LOOPBACK = ("127.0.0.1", "::1", "localhost")


class TransferEngine(ExchangePort, PromptEngine, Protocol):
    """An engine whose blocks can leave and enter."""


class TransferService:
    """``fetcher`` brings blocks here, None in a replica that only computes prompts for others."""

    def __init__(self, config: BackendConfig, engine: TransferEngine, exchange: ExchangeInfo) -> None:
        """Open the engine's exchange.

        Raises:
            ExchangeError: it cannot be opened.
            ValueError: anybody could connect.
        """
        if not config.pool_token and config.host not in _LOOPBACK:
            raise ValueError("transfer: links between machines need the pool token")
        self.counters = TransferCounters()
        self._config = config
        self._exchange = open_exchange(exchange)
        desk = Desk(engine, self._exchange)
        secret, transfer = config.pool_token, config.transfer
        self.fetcher = None
        if config.role != "prefill":
            self.fetcher = Fetcher(desk, transfer, secret, self.counters)
        self._server: PrefillServer | None = None
        if config.role != "decode":
            self._server = PrefillServer(engine, desk, transfer, secret, self.counters)

    @property
    def address(self) -> str:
        """``host:port`` where other replicas reach this one; empty when it computes nothing for them."""
        if self._server is None:
            return ""
        own = self._config.transfer.address.replace("{id}", self._config.replica_id)
        return own or f"{self._config.host}:{self._server.port}"

    async def start(self) -> None:
        """Listen.

        Raises:
            OSError: the port is taken.
        """
        if self._server is not None:
            await self._server.listen(self._config.host)

    async def wait_idle(self) -> None:
        """Until nothing is computed for others."""
        if self._server is not None:
            await self._server.wait_idle()

    async def close(self) -> None:
        """End what is in progress. The exchange stays mapped as long as the process: a slot may be in use."""
        if self._server is not None:
            await self._server.close()
        await asyncio.sleep(0)


def split_address(address: str) -> tuple[str, int]:
    """Host and port of ``host:port``.

    Raises:
        ValueError: it is not that.
    """
    host, _, port = address.rpartition(":")
    if not host or not port.isdecimal() or not 0 < int(port) < 65536:
        raise ValueError(f"{address!r} is not HOST:PORT")
    return host.strip("[]"), int(port)
