"""Bodies that nobody wants are not read, and those that are wanted have a bound over all connections."""

from __future__ import annotations

import asyncio

import pytest

from gateway.config import GatewayConfig
from gateway.edge.admission import BodyBudget
from tests.unit.gateway.edge_fixture import Edge, RawClient, serve_edge

BIG = 1_000_000


async def to_aiohttp(client: RawClient) -> None:
    """Make the connection aiohttp's, as any request that is not hot does."""
    client.send(b"GET /other HTTP/1.1\r\nHost: x\r\n\r\n")
    assert (await client.answer()).json()["served_by"] == "aiohttp"


def announce(client: RawClient, num_bytes: int, *headers: str) -> None:
    """Only the head of a request with a body of so many bytes."""
    lines = ["POST /hot/echo HTTP/1.1", "Host: x", f"Content-Length: {num_bytes}", *headers, "", ""]
    client.send("\r\n".join(lines).encode())


async def connect(edge: Edge, is_cold: bool) -> RawClient:
    client = await edge.connect()
    if is_cold:
        await to_aiohttp(client)
    return client


@pytest.mark.parametrize("is_cold", [False, True])
@pytest.mark.parametrize("headers", [(), ("Expect: 100-continue",)])
async def test_an_unwanted_body_is_refused_before_it_is_read(is_cold: bool, headers: tuple[str, ...]) -> None:
    async with serve_edge() as edge:
        client = await connect(edge, is_cold)
        announce(client, BIG, "X-Unwanted: 1", *headers)
        answer = await client.answer()
        assert answer.status == 200, "the handler's own answer, not 100"
        assert answer.json()["body"] == ""
        assert answer.headers["connection"].lower() == "close"
        assert edge.bodies.num_taken == 0
        await client.close()


async def test_an_unwanted_body_that_is_being_sent_can_read_why() -> None:
    async with serve_edge() as edge:
        client = await edge.connect()
        client.post("/hot/echo", b"x" * 5 * BIG, "X-Unwanted: 1")
        assert (await client.answer()).json()["body"] == ""
        assert await client.at_end() == b""


@pytest.mark.parametrize("is_cold", [False, True])
async def test_a_wanted_body_is_invited_and_read(is_cold: bool) -> None:
    async with serve_edge() as edge:
        client = await connect(edge, is_cold)
        announce(client, BIG, "Expect: 100-continue")
        assert (await client.answer()).status == 100
        client.send(b"x" * BIG)
        answer = await client.answer()
        assert len(str(answer.json()["body"])) == BIG
        await asyncio.sleep(0.01)
        assert edge.bodies.num_taken == 0


@pytest.mark.parametrize("is_cold", [False, True])
async def test_a_body_that_comes_while_it_is_checked_is_read_whole(is_cold: bool) -> None:
    async with serve_edge() as edge:
        client = await connect(edge, is_cold)
        for _ in range(2):
            client.post("/hot/echo", b"y" * BIG)
            assert len(str((await client.answer()).json()["body"])) == BIG


@pytest.mark.parametrize("is_cold", [False, True])
async def test_bodies_are_bounded_over_all_connections(is_cold: bool) -> None:
    async with serve_edge(
        GatewayConfig(port=0, max_buffered_body_bytes=3 * BIG, shutdown_grace_s=0.1)
    ) as edge:
        senders = [await connect(edge, is_cold) for _ in range(3)]
        for sender in senders:
            announce(sender, BIG)
            sender.send(b"x")
        while edge.bodies.num_taken < 3 * BIG:  # noqa: ASYNC110 - the edge tells nobody
            await asyncio.sleep(0.01)
        late = await connect(edge, False)
        announce(late, BIG)
        late.send(b"x")
        assert (await late.answer()).status == 503
        small = await connect(edge, False)
        small.post("/hot/echo", b"small")
        assert (await small.answer()).json()["body"] == "small", "what came with its head is no burden"
        senders[0].send(b"x" * (BIG - 1))
        assert (await senders[0].answer()).status == 200
        senders[1].reset()
        await asyncio.sleep(0.05)
        assert edge.bodies.num_taken == BIG
        again = await connect(edge, is_cold)
        again.post("/hot/echo", b"z" * BIG)
        assert (await again.answer()).status == 200


async def test_a_chunked_body_counts_as_it_grows() -> None:
    async with serve_edge(GatewayConfig(port=0, max_buffered_body_bytes=BIG)) as edge:
        client = await edge.connect()
        client.send(b"POST /hot/echo HTTP/1.1\r\nHost: x\r\nTransfer-Encoding: chunked\r\n\r\n")
        chunk = b"40000\r\n" + b"x" * 0x40000 + b"\r\n"
        client.send(chunk * 3)
        while edge.bodies.num_taken < 3 * 0x40000:  # noqa: ASYNC110 - the edge tells nobody
            await asyncio.sleep(0.01)
        client.send(chunk)
        assert (await client.answer()).status == 503
        assert edge.bodies.num_taken == 0


async def test_a_client_that_goes_while_it_is_checked_leaves_nothing_behind() -> None:
    async with serve_edge() as edge:
        client = await edge.connect()
        announce(client, BIG)
        client.reset()
        await asyncio.sleep(0.05)
        assert edge.server.num_connections == 0
        assert edge.bodies.num_taken == 0
        assert edge.witness.requests == []


async def test_the_absolute_form_of_a_target_is_taken() -> None:
    async with serve_edge() as edge:
        client = await edge.connect()
        client.post("http://somewhere:80/hot/echo?q=1", b"{}")
        answer = (await client.answer()).json()
        assert (answer["path"], answer["query"]) == ("/hot/echo", "q=1")


def test_a_budget_takes_all_or_nothing() -> None:
    budget = BodyBudget(10)
    assert budget.take(6)
    assert not budget.take(5)
    assert budget.take(4)
    budget.give_back(6)
    assert budget.num_taken == 4
