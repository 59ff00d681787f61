"""A served edge with handlers to look at, and a raw client that sends what it is told."""

from __future__ import annotations

import asyncio
import json
import time
from collections.abc import AsyncIterator, Mapping
from contextlib import asynccontextmanager, suppress
from dataclasses import dataclass, field

from aiohttp import web

from gateway.config import GatewayConfig
from gateway.edge.admission import BodyBudget
from gateway.edge.aiohttp_exchange import expect_continue, serve_exchange
from gateway.edge.exchange import Exchange, Handler
from gateway.edge.server import EdgeServer

JSON = (("content-type", "application/json"),)


@dataclass
class Witness:
    """What the handlers saw."""

    requests: list[Exchange] = field(default_factory=list)
    gone_at: float = 0.0
    writable: list[bool] = field(default_factory=list)
    proceed: asyncio.Event = field(default_factory=asyncio.Event)
    ended: asyncio.Event = field(default_factory=asyncio.Event)
    arrived: asyncio.Event = field(default_factory=asyncio.Event)

    def gone(self) -> None:
        self.gone_at = time.monotonic()
        self.proceed.set()


def handlers_of(witness: Witness) -> dict[str, Handler]:
    """One handler for each way to answer."""

    async def echo(exchange: Exchange) -> None:
        witness.requests.append(exchange)
        facts = {
            "method": exchange.method,
            "path": exchange.path,
            "query": exchange.query,
            "headers": dict(exchange.headers),
            "body": exchange.body.decode("latin-1"),
            "peer": exchange.peer,
        }
        exchange.respond(200, JSON, json.dumps(facts).encode())

    async def stream(exchange: Exchange) -> None:
        witness.requests.append(exchange)
        exchange.start_stream(200, (("content-type", "text/event-stream"),))
        exchange.write(b"one,")
        await asyncio.sleep(0)
        exchange.write(b"two,")
        exchange.finish(b"three")

    async def cut(exchange: Exchange) -> None:
        exchange.start_stream(200, ())
        exchange.write(b"half")
        await asyncio.sleep(0.01)
        exchange.abort()

    async def wait(exchange: Exchange) -> None:
        witness.requests.append(exchange)
        exchange.on_disconnect(witness.gone)
        witness.arrived.set()
        await witness.proceed.wait()
        exchange.respond(200, (), b"late")
        witness.ended.set()

    async def flood(exchange: Exchange) -> None:
        witness.requests.append(exchange)
        exchange.on_disconnect(witness.gone)
        exchange.on_writable(witness.writable.append)
        exchange.start_stream(200, ())
        for _ in range(400):
            exchange.write(b"x" * 65536)
        witness.arrived.set()
        await witness.proceed.wait()
        exchange.finish()
        witness.ended.set()

    async def fail(exchange: Exchange) -> None:
        if exchange.body == b"late":
            exchange.start_stream(200, ())
            exchange.write(b"half")
        raise RuntimeError("a fault in a handler")

    async def silent(exchange: Exchange) -> None:
        return

    async def inject(exchange: Exchange) -> None:
        try:
            exchange.respond(200, (("x", "a\r\nset-cookie: b"),), b"")
        except ValueError as error:
            exchange.respond(500, (), str(error).encode())

    named = [echo, stream, cut, wait, flood, fail, silent, inject]
    return {f"/hot/{handler.__name__}": handler for handler in named}


@dataclass
class Edge:
    server: EdgeServer
    witness: Witness
    bodies: BodyBudget
    clients: list[RawClient] = field(default_factory=list)

    async def connect(self) -> RawClient:
        reader, writer = await asyncio.open_connection("127.0.0.1", self.server.port)
        self.clients.append(RawClient(reader, writer))
        return self.clients[-1]


@asynccontextmanager
async def serve_edge(config: GatewayConfig | None = None) -> AsyncIterator[Edge]:
    """Serve handlers hot and, through aiohttp, the same ones cold."""
    config = config or GatewayConfig(port=0)
    witness = Witness()
    handlers = handlers_of(witness)

    bodies = BodyBudget(config.max_buffered_body_bytes)

    async def is_wanted(path: str, headers: Mapping[str, str]) -> bool:
        await asyncio.sleep(0)
        return "x-unwanted" not in headers

    async def cold(request: web.Request) -> web.StreamResponse:
        handler = handlers["/" + request.raw_path.lstrip("/").partition("?")[0]]
        return await serve_exchange(request, handler, config, early_check=is_wanted, bodies=bodies)

    async def expect(request: web.Request) -> None:
        await expect_continue(request, is_wanted)

    async def plain(request: web.Request) -> web.Response:
        return web.json_response({"served_by": "aiohttp", "method": request.method, "path": request.raw_path})

    app = web.Application(client_max_size=config.max_body_bytes)
    app.router.add_post("/hot/{name}", cold, expect_handler=expect)
    app.router.add_route("*", "/{tail:.*}", plain)
    server = EdgeServer(
        config,
        lambda path: handlers.get(path.partition("%")[0]),
        app,
        early_check=is_wanted,
        bodies=bodies,
    )
    await server.start()
    edge = Edge(server, witness, bodies)
    try:
        yield edge
    finally:
        witness.proceed.set()
        await server.stop()
        for client in edge.clients:
            await client.close()


@dataclass
class Answer:
    status: int
    headers: dict[str, str]
    body: bytes

    def json(self) -> dict[str, object]:
        value: dict[str, object] = json.loads(self.body)
        return value


class RawClient:
    """Sends raw bytes and reads answers with its own small parser."""

    def __init__(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self.reader = reader
        self.writer = writer

    def send(self, data: bytes) -> None:
        self.writer.write(data)

    def post(self, path: str, body: bytes = b"", *headers: str, version: str = "1.1") -> None:
        lines = [f"POST {path} HTTP/{version}", "Host: x", f"Content-Length: {len(body)}", *headers]
        self.send("\r\n".join([*lines, "", ""]).encode() + body)

    async def answer(self) -> Answer:
        async with asyncio.timeout(10):
            head = (await self.reader.readuntil(b"\r\n\r\n")).decode("latin-1")
            line, *fields = head.rstrip("\r\n").split("\r\n")
            headers = {name.lower(): value for name, _, value in (one.partition(": ") for one in fields)}
            status = int(line.split()[1])
            if status < 200:
                return Answer(status, headers, b"")
            if "content-length" in headers:
                body = await self.reader.readexactly(int(headers["content-length"]))
            elif headers.get("transfer-encoding") == "chunked":
                body = await self._chunks()
            else:
                body = await self.reader.read()
            return Answer(status, headers, body)

    async def _chunks(self) -> bytes:
        pieces = []
        while True:
            size = int(await self.reader.readuntil(b"\r\n"), 16)
            pieces.append(await self.reader.readexactly(size))
            assert await self.reader.readexactly(2) == b"\r\n"
            if not size:
                return b"".join(pieces)

    async def at_end(self) -> bytes:
        """Everything until the server closes."""
        async with asyncio.timeout(10):
            return await self.reader.read()

    async def close(self) -> None:
        self.writer.close()
        with suppress(OSError):
            await self.writer.wait_closed()

    def reset(self) -> None:
        self.writer.transport.abort()
