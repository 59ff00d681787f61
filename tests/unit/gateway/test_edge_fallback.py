"""Everything but hot requests goes to aiohttp on the same port, and hot handlers work there too."""

from __future__ import annotations

import asyncio
import time

import pytest

from gateway.config import GatewayConfig
from tests.unit.gateway.edge_fixture import RawClient, serve_edge


async def cold(client: RawClient) -> RawClient:
    """Make aiohttp take over the connection."""
    client.send(b"GET /cold HTTP/1.1\r\nHost: x\r\n\r\n")
    assert (await client.answer()).json()["served_by"] == "aiohttp"
    return client


@pytest.mark.parametrize("method", ["GET", "OPTIONS", "PUT", "DELETE"])
async def test_other_methods_and_paths_go_to_aiohttp(method: str) -> None:
    async with serve_edge() as edge:
        client = await edge.connect()
        client.send(f"{method} /hot/echo?x=1 HTTP/1.1\r\nHost: x\r\nContent-Length: 2\r\n\r\n".encode())
        client.send(b"ab")
        assert (await client.answer()).json() == {
            "served_by": "aiohttp",
            "method": method,
            "path": "/hot/echo?x=1",
        }


async def test_a_head_request_goes_to_aiohttp() -> None:
    async with serve_edge() as edge:
        client = await edge.connect()
        client.send(b"HEAD /hot/echo HTTP/1.1\r\nHost: x\r\nConnection: close\r\n\r\n")
        assert (await client.at_end()).startswith(b"HTTP/1.1 200")


async def test_a_hot_connection_can_turn_cold() -> None:
    async with serve_edge() as edge:
        client = await edge.connect()
        client.post("/hot/echo", b"a")
        assert (await client.answer()).json()["body"] == "a"
        client.post("/other", b"b")
        assert (await client.answer()).json()["served_by"] == "aiohttp"


async def test_hot_handlers_see_the_same_through_aiohttp() -> None:
    async with serve_edge() as edge:
        seen = []
        for client in (await edge.connect(), await cold(await edge.connect())):
            client.post("/hot/echo?q=%20", b"\x00\xff", "X-Mixed: A", "x-mixed: \u00e9")
            seen.append((await client.answer()).json())
        assert seen[0] == seen[1]


async def test_streams_and_cuts_look_the_same_through_aiohttp() -> None:
    async with serve_edge() as edge:
        client = await cold(await edge.connect())
        client.post("/hot/stream")
        answer = await client.answer()
        assert answer.headers["content-type"] == "text/event-stream"
        assert answer.body == b"one,two,three"
        client.post("/hot/cut")
        assert (await client.at_end()).endswith(b"4\r\nhalf\r\n")


async def test_failures_look_the_same_through_aiohttp() -> None:
    async with serve_edge() as edge:
        client = await cold(await edge.connect())
        client.post("/hot/inject")
        assert (await client.answer()).status == 500
        client.post("/hot/silent")
        assert (await client.answer()).status == 500
        client.post("/hot/fail")
        assert (await client.answer()).status == 500


async def test_a_client_that_goes_is_noticed_through_aiohttp() -> None:
    async with serve_edge() as edge:
        client = await cold(await edge.connect())
        client.post("/hot/wait")
        await edge.witness.arrived.wait()
        left_at = time.monotonic()
        await client.close()
        async with asyncio.timeout(2):
            await edge.witness.ended.wait()
        assert edge.witness.gone_at - left_at < 0.2
        assert edge.witness.requests[0].is_disconnected


async def test_a_slow_reader_is_told_of_through_aiohttp() -> None:
    async with serve_edge(GatewayConfig(port=0, write_buffer_bytes=100_000)) as edge:
        client = await cold(await edge.connect())
        client.post("/hot/flood")
        await edge.witness.arrived.wait()
        assert edge.witness.writable == [False]
        edge.witness.proceed.set()
        assert len((await client.answer()).body) % 65536 == 0
        assert edge.witness.writable == [False, True]


async def test_a_client_that_reads_nothing_is_dropped_through_aiohttp() -> None:
    config = GatewayConfig(port=0, write_buffer_bytes=100_000, write_timeout_s=0.3)
    async with serve_edge(config) as edge:
        client = await cold(await edge.connect())
        client.post("/hot/flood")
        async with asyncio.timeout(5):
            await edge.witness.proceed.wait()
        assert edge.witness.gone_at


async def test_stop_lets_a_cold_request_end() -> None:
    async with serve_edge() as edge:
        client = await cold(await edge.connect())
        client.post("/hot/wait")
        await edge.witness.arrived.wait()
        stopping = asyncio.create_task(edge.server.stop())
        await asyncio.sleep(0.05)
        assert not stopping.done()
        edge.witness.proceed.set()
        assert (await client.answer()).body == b"late"
        async with asyncio.timeout(3):
            await stopping
