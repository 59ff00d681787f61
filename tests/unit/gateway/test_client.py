"""Requests to replicas: pooling, the one retry, deadlines, and no broken answer that looks whole."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

import pytest

from gateway.client import (
    ReplicaAbortedError,
    ReplicaAnswerTooLargeError,
    ReplicaClient,
    ReplicaError,
    ReplicaLostError,
    ReplicaResponse,
    ReplicaTimeoutError,
    ReplicaUnreachableError,
)
from gateway.config import ReplicaAddress, UpstreamConfig
from tests.support.ports import free_port
from tests.support.waiting import eventually
from tests.unit.gateway.scripted_replica import ScriptedReplica, answer, chunked, scripted_replica

HEADERS = (("content-type", "application/json"),)


@asynccontextmanager
async def replica_client(config: UpstreamConfig | None = None) -> AsyncIterator[ReplicaClient]:
    client = ReplicaClient(config or UpstreamConfig())
    try:
        yield client
    finally:
        await client.close()


async def ask(client: ReplicaClient, replica: ScriptedReplica, body: bytes = b"{}") -> ReplicaResponse:
    return await client.open(replica.address, "/v1/chat/completions", HEADERS, body)


def then_sleep(sent: bytes) -> object:
    async def act(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        writer.write(sent)
        await reader.read()
        raise ConnectionResetError

    return act


async def test_a_connection_is_kept_and_used_again() -> None:
    async with (
        scripted_replica(answer(b"one", "X-A: 1", "x-a: 2"), chunked(b"t", b"wo")) as replica,
        replica_client() as client,
    ):
        first = await ask(client, replica, b"body")
        assert (first.status, first.headers["x-a"], await first.read()) == (200, "1, 2", b"one")
        assert await (await ask(client, replica)).read() == b"two"
        assert replica.num_connections == 1
        assert client.num_connections(replica.address) == 1
        assert (
            replica.requests[0]
            == (
                f"POST /base/v1/chat/completions HTTP/1.1\r\nhost: 127.0.0.1:{replica.port}\r\n"
                "content-type: application/json\r\ncontent-length: 4\r\n\r\nbody"
            ).encode()
        )


async def test_parallel_requests_use_connections_of_their_own() -> None:
    async with scripted_replica(*[answer(b"x")] * 5) as replica, replica_client() as client:
        responses = await asyncio.gather(*[ask(client, replica) for _ in range(5)])
        assert [await one.read() for one in responses] == [b"x"] * 5
        assert replica.num_connections == 5


async def test_connections_are_bounded() -> None:
    config = UpstreamConfig(max_connections_per_replica=1)
    async with (
        scripted_replica(
            then_sleep(b"HTTP/1.1 200 OK\r\nContent-Length: 9\r\n\r\n"), answer(b"x")
        ) as replica,
        replica_client(config) as client,
    ):
        first = await ask(client, replica)
        with pytest.raises(ReplicaUnreachableError, match="in use"):
            await ask(client, replica)
        first.abort()
        await eventually(lambda: client.num_connections(replica.address) == 0)
        assert await (await ask(client, replica)).read() == b"x"


async def test_close_is_honoured() -> None:
    async with (
        scripted_replica(answer(b"a", "Connection: close"), answer(b"b")) as replica,
        replica_client() as client,
    ):
        assert await (await ask(client, replica)).read() == b"a"
        assert await (await ask(client, replica)).read() == b"b"
        assert replica.num_connections == 2


async def test_a_stale_connection_is_retried_once_on_a_fresh_one() -> None:
    async with scripted_replica(answer(b"a"), None, answer(b"b")) as replica, replica_client() as client:
        assert await (await ask(client, replica)).read() == b"a"
        assert await (await ask(client, replica)).read() == b"b"
        assert len(replica.requests) == 3
        assert replica.num_connections == 2


async def test_a_fresh_connection_that_closes_is_not_retried() -> None:
    async with scripted_replica(None) as replica, replica_client() as client:
        with pytest.raises(ReplicaUnreachableError, match="r1: the connection closed before an answer"):
            await ask(client, replica)
        assert len(replica.requests) == 1


async def test_a_stale_retry_that_closes_too_is_unreachable() -> None:
    async with scripted_replica(answer(b"a"), None, None) as replica, replica_client() as client:
        await (await ask(client, replica)).read()
        with pytest.raises(ReplicaUnreachableError):
            await ask(client, replica)
        assert len(replica.requests) == 3


async def test_a_kept_connection_that_closed_is_not_used() -> None:
    async def act(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        writer.write(answer(b"a"))
        await writer.drain()
        raise ConnectionResetError

    async with scripted_replica(act, answer(b"b")) as replica, replica_client() as client:
        await (await ask(client, replica)).read()
        await eventually(lambda: client.num_connections(replica.address) == 0)
        assert await (await ask(client, replica)).read() == b"b"
        assert len(replica.requests) == 2


async def test_an_idle_connection_is_closed_after_its_time() -> None:
    config = UpstreamConfig(keepalive_timeout_s=0.05)
    async with scripted_replica(answer(b"a")) as replica, replica_client(config) as client:
        await (await ask(client, replica)).read()
        await eventually(lambda: replica.open_connections == 0, timeout_s=3)
        assert client.num_connections(replica.address) == 0


async def test_nobody_listening_is_unreachable() -> None:
    async with replica_client() as client:
        with pytest.raises(ReplicaUnreachableError, match="cannot connect"):
            await client.open(ReplicaAddress(id="gone", url=f"http://127.0.0.1:{free_port()}"), "/", ())


@pytest.mark.parametrize(
    "sent",
    [
        b"HTTP/1.1 200 OK\r\nContent-Le",
        b"HTTP/1.1 200 OK\r\nContent-Length: 10\r\n\r\nhalf",
        chunked(b"half", is_complete=False),
        b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n9\r\nhalf",
        b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n4\r\nhalf\r\n0\r\n",
        b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\nzz\r\nhalf\r\n0\r\n\r\n",
        b"HTTP/1.1 200 OK\r\n\r\nno length: a cut could not be told from the end",
        b"HTTP/1.1 200 OK\r\nContent-Length: 4\r\nTransfer-Encoding: chunked\r\n\r\nhalf",
        b"HTTP/1.1 101 Switching Protocols\r\nUpgrade: x\r\nConnection: upgrade\r\n\r\n",
        b"SSH-2.0-OpenSSH\r\n",
    ],
)
@pytest.mark.parametrize("is_relay", [False, True])
async def test_a_broken_answer_is_lost_and_never_whole(sent: bytes, is_relay: bool) -> None:
    async def act(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        writer.write(sent)
        await writer.drain()
        raise ConnectionResetError

    pieces: list[bytes] = []

    async def take(response: ReplicaResponse) -> None:
        if is_relay:
            await response.relay(pieces.append)
        else:
            pieces.append(await response.read())

    async with scripted_replica(act) as replica, replica_client() as client:
        with pytest.raises(ReplicaLostError):
            await take(await ask(client, replica))
        await eventually(lambda: client.num_connections(replica.address) == 0)
    assert b"".join(pieces) in (b"", b"half")


async def test_bytes_after_the_end_spoil_the_connection_but_not_the_answer() -> None:
    async with (
        scripted_replica(answer(b"a") + answer(b"sneaked"), answer(b"b")) as replica,
        replica_client() as client,
    ):
        assert await (await ask(client, replica)).read() == b"a"
        assert await (await ask(client, replica)).read() == b"b"
        assert replica.num_connections == 2


async def test_bytes_that_nobody_asked_for_close_a_kept_connection() -> None:
    async def act(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        writer.write(answer(b"a"))
        await asyncio.sleep(0.05)
        writer.write(answer(b"sneaked"))

    async with scripted_replica(act) as replica, replica_client() as client:
        assert await (await ask(client, replica)).read() == b"a"
        await eventually(lambda: client.num_connections(replica.address) == 0)


async def test_interim_answers_are_skipped() -> None:
    interim = b"HTTP/1.1 100 Continue\r\n\r\nHTTP/1.1 103 Early Hints\r\nLink: x\r\n\r\n"
    async with scripted_replica(interim + answer(b"a"), answer(b"b")) as replica, replica_client() as client:
        response = await ask(client, replica)
        assert (response.status, "link" in response.headers, await response.read()) == (200, False, b"a")
        assert await (await ask(client, replica)).read() == b"b"
        assert replica.num_connections == 1


async def test_an_answer_without_a_body_is_whole() -> None:
    async with (
        scripted_replica(b"HTTP/1.1 204 No Content\r\n\r\n", answer(b"")) as replica,
        replica_client() as client,
    ):
        assert await (await ask(client, replica)).read() == b""
        assert await (await ask(client, replica)).read() == b""


async def test_relay_gives_pieces_as_they_come_and_keeps_the_connection() -> None:
    async def act(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        for piece in (chunked(b"one", b"two", is_complete=False), b"5\r\nthree\r\n", b"0\r\n\r\n"):
            writer.write(piece)
            await asyncio.sleep(0.02)

    pieces: list[bytes] = []
    async with scripted_replica(act, answer(b"b")) as replica, replica_client() as client:
        response = await ask(client, replica)
        await response.relay(pieces.append)
        assert pieces == [b"onetwo", b"three"]
        response.abort()
        assert await (await ask(client, replica)).read() == b"b"
        assert replica.num_connections == 1


async def test_relay_of_an_answer_that_has_already_come() -> None:
    pieces: list[bytes] = []
    async with scripted_replica(chunked(b"one", b"two")) as replica, replica_client() as client:
        response = await ask(client, replica)
        await asyncio.sleep(0.05)
        await response.relay(pieces.append)
        assert pieces == [b"onetwo"]


@pytest.mark.parametrize("delay_s", [0.0, 0.05])
async def test_a_consumer_that_refuses_fails_the_relay(delay_s: float) -> None:
    def refuse(piece: bytes) -> None:
        raise ValueError("not what I want")

    async with scripted_replica(chunked(b"one")) as replica, replica_client() as client:
        response = await ask(client, replica)
        await asyncio.sleep(delay_s)
        with pytest.raises(ValueError, match="not what I want"):
            await response.relay(refuse)


async def test_abort_closes_the_connection_at_once() -> None:
    gone = asyncio.Event()

    async def act(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        writer.write(chunked(b"one", is_complete=False))
        await reader.read()
        gone.set()
        raise ConnectionResetError

    async with scripted_replica(act) as replica, replica_client() as client:
        response = await ask(client, replica)
        relay = response.relay(lambda piece: None)
        started = time.monotonic()
        response.abort()
        response.abort()
        with pytest.raises(ReplicaAbortedError):
            await relay
        async with asyncio.timeout(2):
            await gone.wait()
        assert time.monotonic() - started < 0.2
        assert client.num_connections(replica.address) == 0


@pytest.mark.parametrize("phase", ["open", "read", "relay"])
async def test_cancelling_aborts(phase: str) -> None:
    sent = b"" if phase == "open" else chunked(b"one", is_complete=False)
    async with scripted_replica(then_sleep(sent)) as replica, replica_client() as client:

        async def work() -> None:
            response = await ask(client, replica)
            if phase == "read":
                await response.read()
            await response.relay(lambda piece: None)

        task = asyncio.create_task(work())
        await eventually(lambda: bool(replica.requests))
        await asyncio.sleep(0.05)
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task
        await eventually(lambda: replica.open_connections == 0, timeout_s=2)


@pytest.mark.parametrize(
    ("config", "sent", "phase"),
    [
        (UpstreamConfig(first_byte_timeout_s=0.1), b"", "first_byte"),
        (UpstreamConfig(idle_timeout_s=0.1), chunked(b"one", is_complete=False), "idle"),
        (UpstreamConfig(request_timeout_s=0.1), b"", "total"),
    ],
)
async def test_deadlines(config: UpstreamConfig, sent: bytes, phase: str) -> None:
    async with scripted_replica(then_sleep(sent)) as replica, replica_client(config) as client:
        started = time.monotonic()
        with pytest.raises(ReplicaTimeoutError) as caught:
            await (await ask(client, replica)).relay(lambda piece: None)
        assert caught.value.phase == phase
        assert caught.value.replica_id == "r1"
        assert time.monotonic() - started < 1
        await eventually(lambda: replica.open_connections == 0, timeout_s=2)


async def test_a_trickle_meets_the_total_deadline() -> None:
    async def act(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        writer.write(chunked(is_complete=False))
        while not writer.is_closing():
            writer.write(b"1\r\nx\r\n")
            await asyncio.sleep(0.02)

    config = UpstreamConfig(idle_timeout_s=0.2, request_timeout_s=0.4)
    async with scripted_replica(act) as replica, replica_client(config) as client:
        with pytest.raises(ReplicaTimeoutError, match="total"):
            await (await ask(client, replica)).relay(lambda piece: None)


async def test_one_call_can_have_a_shorter_deadline() -> None:
    async with scripted_replica(then_sleep(b"")) as replica, replica_client() as client:
        with pytest.raises(ReplicaTimeoutError):
            await client.fetch(replica.address, "/health", timeout_s=0.1)


async def test_pausing_stops_the_replica_and_not_the_clock_of_the_client() -> None:
    sent = 0

    async def act(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        nonlocal sent
        writer.write(chunked(is_complete=False))
        for _ in range(400):
            writer.write(b"10000\r\n" + b"x" * 65536 + b"\r\n")
            await writer.drain()
            sent += 65536
        writer.write(b"0\r\n\r\n")

    received: list[int] = []
    async with (
        scripted_replica(act, answer(b"b")) as replica,
        replica_client(UpstreamConfig(idle_timeout_s=0.3)) as client,
    ):
        response = await ask(client, replica)
        response.pause_reading()
        relay = response.relay(lambda piece: received.append(len(piece)))
        await asyncio.sleep(0.7)
        assert not relay.done()
        assert sent < 400 * 65536
        held = sum(received)
        response.resume_reading()
        await relay
        assert held < sum(received) == 400 * 65536
        assert await (await ask(client, replica)).read() == b"b"
        assert replica.num_connections == 1


@pytest.mark.parametrize("sent", [answer(b"x" * 2000), chunked(b"x" * 600, b"x" * 600)])
@pytest.mark.parametrize("is_relay", [False, True])
async def test_an_answer_is_bounded(sent: bytes, is_relay: bool) -> None:
    async with (
        scripted_replica(sent) as replica,
        replica_client(UpstreamConfig(max_response_bytes=1000)) as client,
    ):
        response = await ask(client, replica)
        with pytest.raises(ReplicaAnswerTooLargeError):
            await (response.relay(lambda piece: None) if is_relay else response.read())


async def test_a_read_can_have_a_smaller_bound() -> None:
    async with scripted_replica(answer(b"x" * 100), answer(b"y")) as replica, replica_client() as client:
        with pytest.raises(ReplicaAnswerTooLargeError):
            await client.fetch(replica.address, "/stats", limit=99)


async def test_fetch_returns_status_and_body() -> None:
    async with (
        scripted_replica(answer(b"{}", status="503 Service Unavailable")) as replica,
        replica_client() as client,
    ):
        assert await client.fetch(replica.address, "/health?x=1") == (503, b"{}")
        assert replica.requests[0].startswith(b"GET /base/health?x=1 HTTP/1.1\r\n")


async def test_a_large_body_arrives_whole() -> None:
    async with scripted_replica(answer(b"a")) as replica, replica_client() as client:
        await (await ask(client, replica, b"x" * 3_000_000)).read()
        assert replica.requests[0].endswith(b"\r\n\r\n" + b"x" * 3_000_000)


@pytest.mark.parametrize(
    ("path", "headers"),
    [("/", (("x", "a\r\nb: c"),)), ("/", (("x\n", "a"),)), ("/a b", ()), ("/a\r\nb", ()), ("relative", ())],
)
async def test_a_request_cannot_be_split(path: str, headers: tuple[tuple[str, str], ...]) -> None:
    async with scripted_replica() as replica, replica_client() as client:
        with pytest.raises(ValueError, match=r"line break|cannot be requested"):
            await client.open(replica.address, path, headers)
        assert replica.requests == []


async def test_a_wrong_address_names_the_replica() -> None:
    async with replica_client() as client:
        with pytest.raises(ValueError, match="url of replica r9"):
            await client.open(ReplicaAddress(id="r9", url="ftp://x"), "/", ())


async def test_closing_fails_what_is_in_flight() -> None:
    async with scripted_replica(then_sleep(chunked(b"one", is_complete=False))) as replica:
        client = ReplicaClient(UpstreamConfig())
        relay = (await ask(client, replica)).relay(lambda piece: None)
        await client.close()
        with pytest.raises(ReplicaError):
            await relay
        with pytest.raises(ReplicaUnreachableError):
            await ask(client, replica)
