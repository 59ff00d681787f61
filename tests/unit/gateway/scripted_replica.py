"""A replica that answers each request with the next line of a script, byte for byte."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager, suppress
from dataclasses import dataclass, field

from gateway.config import ReplicaAddress

Act = Callable[[asyncio.StreamReader, asyncio.StreamWriter], Awaitable[None]]
Step = bytes | Act | None
"""What to send, what to do, or None to close without an answer."""


@dataclass
class ScriptedReplica:
    port: int
    steps: list[Step]
    requests: list[bytes] = field(default_factory=list)
    num_connections: int = 0
    open_connections: int = 0

    @property
    def address(self) -> ReplicaAddress:
        return ReplicaAddress(id="r1", url=f"http://127.0.0.1:{self.port}/base/")

    async def serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self.num_connections += 1
        self.open_connections += 1
        try:
            while await self._answer(reader, writer):
                pass
        except OSError:
            pass
        finally:
            self.open_connections -= 1
            writer.close()
            with suppress(OSError):
                await writer.wait_closed()

    async def _answer(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> bool:
        try:
            head = await reader.readuntil(b"\r\n\r\n")
        except asyncio.IncompleteReadError:
            return False
        length = int(head.lower().partition(b"content-length: ")[2].partition(b"\r\n")[0])
        self.requests.append(head + await reader.readexactly(length))
        step = self.steps.pop(0)
        if step is None:
            return False
        if isinstance(step, bytes):
            writer.write(step)
            await writer.drain()
        else:
            await step(reader, writer)
        return True


@asynccontextmanager
async def scripted_replica(*steps: Step) -> AsyncIterator[ScriptedReplica]:
    replica = ScriptedReplica(0, list(steps))
    tasks: set[asyncio.Task[None]] = set()

    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        task = asyncio.current_task()
        assert task is not None
        tasks.add(task)
        try:
            await replica.serve(reader, writer)
        except asyncio.CancelledError:  # the test is over
            writer.transport.abort()
        finally:
            tasks.discard(task)

    server = await asyncio.start_server(serve, "127.0.0.1", 0)
    replica.port = server.sockets[0].getsockname()[1]
    try:
        yield replica
    finally:
        server.close()
        for task in list(tasks):
            task.cancel()
        if tasks:
            await asyncio.wait(tasks, timeout=2)


def answer(body: bytes, *headers: str, status: str = "200 OK") -> bytes:
    lines = [f"HTTP/1.1 {status}", f"Content-Length: {len(body)}", *headers]
    return "\r\n".join([*lines, "", ""]).encode() + body


def chunked(*pieces: bytes, is_complete: bool = True) -> bytes:
    chunks = b"".join(b"%x\r\n%b\r\n" % (len(piece), piece) for piece in pieces)
    end = b"0\r\n\r\n" if is_complete else b""
    return b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n" + chunks + end
