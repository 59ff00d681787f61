"""The lean protocol: what it serves, what it refuses, and how it notices that a client goes."""

from __future__ import annotations

import asyncio
import socket
import time

import pytest

from gateway.config import GatewayConfig
from tests.support.waiting import eventually
from tests.unit.gateway.edge_fixture import RawClient, serve_edge


async def test_a_connection_serves_one_request_after_another() -> None:
    async with serve_edge() as edge:
        client = await edge.connect()
        for number in range(3):
            client.post(f"/hot/echo?n={number}", b"body", "X-Mixed: A", "x-mixed: B")
            answer = await client.answer()
            assert answer.status == 200
            facts = answer.json()
            assert facts["body"] == "body"
            assert facts["query"] == f"n={number}"
            assert facts["peer"] == "127.0.0.1"
            assert facts["headers"] == {"host": "x", "content-length": "4", "x-mixed": "A, B"}
            assert "date" in answer.headers


async def test_the_path_stays_percent_encoded() -> None:
    async with serve_edge() as edge:
        client = await edge.connect()
        client.post("/hot/echo%2Fmodel%40x?q=%20", b"")
        facts = (await client.answer()).json()
        assert (facts["path"], facts["query"]) == ("/hot/echo%2Fmodel%40x", "q=%20")


async def test_a_request_may_come_byte_by_byte() -> None:
    async with serve_edge() as edge:
        client = await edge.connect()
        for byte in b"\r\nPOST /hot/echo HTTP/1.1\r\nHost: a\r\ncontent-length: 3\r\n\r\nabc":
            client.send(bytes([byte]))
            await asyncio.sleep(0)
        assert (await client.answer()).json()["body"] == "abc"


async def test_pipelined_requests_are_answered_in_order() -> None:
    async with serve_edge() as edge:
        client = await edge.connect()
        one = b"POST /hot/echo HTTP/1.1\r\nHost: a\r\ncontent-length: 1\r\n\r\n"
        chunked = (
            b"POST /hot/echo HTTP/1.1\r\nHost: a\r\ntransfer-encoding: chunked\r\n\r\n1\r\nc\r\n0\r\n\r\n"
        )
        client.send(one + b"a" + one + b"b" + chunked + one + b"d")
        bodies = [(await client.answer()).json()["body"] for _ in range(4)]
        assert bodies == ["a", "b", "c", "d"]


async def test_pipelined_bytes_are_bounded_while_a_request_is_in_flight() -> None:
    async with serve_edge(GatewayConfig(port=0, max_header_bytes=1024)) as edge:
        client = await edge.connect()
        client.post("/hot/wait")
        await edge.witness.arrived.wait()
        client.post("/hot/echo", b"x" * 200_000)
        await asyncio.sleep(0.05)
        edge.witness.proceed.set()
        assert (await client.answer()).body == b"late"
        assert len(str((await client.answer()).json()["body"])) == 200_000


async def test_a_chunked_body_is_joined() -> None:
    async with serve_edge() as edge:
        client = await edge.connect()
        client.send(b"POST /hot/echo HTTP/1.1\r\nHost: a\r\nTransfer-Encoding: Chunked\r\n\r\n3\r\nabc\r\n")
        await asyncio.sleep(0.01)
        client.send(b"2\r\nde\r\n0\r\n\r\n")
        assert (await client.answer()).json()["body"] == "abcde"


async def test_continue_is_sent_when_asked_for() -> None:
    async with serve_edge() as edge:
        client = await edge.connect()
        client.send(
            b"POST /hot/echo HTTP/1.1\r\nHost: a\r\ncontent-length: 3\r\nExpect: 100-continue\r\n\r\n"
        )
        assert (await client.answer()).status == 100
        client.send(b"abc")
        assert (await client.answer()).json()["body"] == "abc"


async def test_a_stream_is_chunked_and_keeps_the_connection() -> None:
    async with serve_edge() as edge:
        client = await edge.connect()
        for _ in range(2):
            client.post("/hot/stream")
            answer = await client.answer()
            assert answer.headers["transfer-encoding"] == "chunked"
            assert answer.body == b"one,two,three"


async def test_http_1_0_streams_until_the_close() -> None:
    async with serve_edge() as edge:
        client = await edge.connect()
        client.post("/hot/stream", b"", version="1.0")
        answer = await client.answer()
        assert "transfer-encoding" not in answer.headers
        assert answer.body == b"one,two,three"


async def test_http_1_0_keeps_alive_only_when_asked() -> None:
    async with serve_edge() as edge:
        client = await edge.connect()
        client.post("/hot/echo", b"", "Connection: keep-alive", version="1.0")
        assert (await client.answer()).headers["connection"] == "keep-alive"
        client.post("/hot/echo", b"", version="1.0")
        assert (await client.answer()).headers["connection"] == "close"
        assert await client.at_end() == b""


async def test_connection_close_is_honoured() -> None:
    async with serve_edge() as edge:
        client = await edge.connect()
        client.post("/hot/echo", b"", "Connection: close")
        assert (await client.answer()).headers["connection"] == "close"
        assert await client.at_end() == b""


CHUNKED = b"POST /hot/echo HTTP/1.1\r\nHost: a\r\nTransfer-Encoding: chunked\r\n"


@pytest.mark.parametrize(
    ("sent", "status"),
    [
        (b"nonsense\r\n\r\n", 400),
        (b"\x16\x03\x01\x02\x00\x01\x00\x01\xfc\x03\x03", 400),
        (b"\x00\x01\x02", 400),
        (b"POST /hot/echo HTTP/1.1\nHost: a\n\n", 400),
        (b"POST /hot/echo HTTP/1.1\r\nContent-Length: 0\r\n\r\n", 400),
        (b"POST /hot/echo HTTP/1.1\r\nHost: a\r\nHost: b\r\nContent-Length: 0\r\n\r\n", 400),
        (CHUNKED + b"Content-Length: 3\r\n\r\n0\r\n\r\n", 400),
        (CHUNKED + b"Transfer-Encoding: identity\r\n\r\n0\r\n\r\n", 400),
        (b"POST /hot/echo HTTP/1.1\r\nHost: a\r\nContent-Length: 3\r\nContent-Length: 4\r\n\r\nabc", 400),
        (b"POST /hot/echo HTTP/1.1\r\nHost: a\r\nContent-Length: 3, 3\r\n\r\nabc", 400),
        (b"POST /hot/echo HTTP/1.1\r\nHost: a\r\nContent-Length: +3\r\n\r\nabc", 400),
        (b"POST /hot/echo HTTP/1.1\r\nHost: a\r\nContent-Length: -3\r\n\r\nabc", 400),
        (b"POST /hot/echo HTTP/1.1\r\nHost: a\r\nContent-Length : 3\r\n\r\nabc", 400),
        (b"POST /hot/echo HTTP/1.1\r\nHost: a\r\nTransfer-Encoding: xchunked\r\n\r\n", 400),
        (b"POST /hot/echo HTTP/1.1\r\nHost: a\r\nTransfer-Encoding: gzip, chunked\r\n\r\n", 400),
        (b"POST /hot/echo HTTP/1.0\r\nTransfer-Encoding: chunked\r\n\r\n0\r\n\r\n", 400),
        (b"POST /hot/echo HTTP/1.1\r\nHost: a\r\nX: a\r\n b\r\nContent-Length: 0\r\n\r\n", 400),
        (b"POST /hot/echo HTTP/1.1\nContent-Length: 0\n\n\r\n\r\n", 400),
        (b"POST /hot/echo HTTP/1.1\r\nHost: a\r\nX: a\x00b\r\nContent-Length: 0\r\n\r\n", 400),
        (b"POST /hot/echo HTTP/1.1\r\nHost: a\r\nX: a\nContent-Length: 0\r\n\r\n", 400),
        (CHUNKED + b"\r\nzz\r\n", 400),
        (b"POST /hot/echo HTTP/2.0\r\nContent-Length: 0\r\n\r\n", 505),
        (b"POST /hot/echo HTTP/1.1\r\nHost: a\r\nContent-Length: 3\r\nExpect: wonders\r\n\r\n", 417),
        (b"POST /hot/echo HTTP/1.1\r\nHost: a\r\nContent-Length: 2001\r\n\r\n", 413),
        (CHUNKED + b"\r\n7d1\r\n", 413),
        (b"POST /hot/echo HTTP/1.1\r\nHost: a\r\nX: " + b"y" * 2000, 431),
        (b"POST /hot/echo HTTP/1.1\r\nHost: a\r\nX: " + b"y" * 2000 + b"\r\n\r\n", 431),
    ],
)
async def test_what_is_not_a_clean_request_is_refused_and_closed(sent: bytes, status: int) -> None:
    async with serve_edge(GatewayConfig(port=0, max_header_bytes=1024, max_body_bytes=2000)) as edge:
        client = await edge.connect()
        client.send(sent)
        answer = await client.answer()
        assert answer.status == status
        assert answer.headers["connection"] == "close"
        assert isinstance(answer.json()["error"], dict)
        client.send(b"POST /hot/echo HTTP/1.1\r\nHost: a\r\ncontent-length: 0\r\n\r\n")
        client.writer.write_eof()
        assert await client.at_end() == b""
        assert edge.witness.requests == []


async def test_who_speaks_tls_is_told_what_is_spoken_here() -> None:
    async with serve_edge(GatewayConfig(port=0)) as edge:
        client = await edge.connect()
        client.send(b"\x16\x03\x01\x02\x00")
        assert "plain HTTP" in (await client.answer()).json()["error"]["message"]


async def test_a_body_over_the_limit_is_refused_even_when_it_came_with_its_head() -> None:
    async with serve_edge(GatewayConfig(port=0, max_body_bytes=4)) as edge:
        client = await edge.connect()
        client.post("/hot/echo", b"12345")
        assert (await client.answer()).status == 413
        assert edge.witness.requests == []


async def test_a_refused_upload_can_read_why() -> None:
    async with serve_edge(GatewayConfig(port=0, max_body_bytes=1000)) as edge:
        client = await edge.connect()
        client.post("/hot/echo", b"x" * 2_000_000)
        await client.writer.drain()
        assert (await client.answer()).status == 413


@pytest.mark.parametrize(
    "sent",
    [
        b"POST /hot/echo HT",
        b"POST /hot/echo HTTP/1.1\r\nHost: a\r\ncontent-length: 9\r\n\r\nab",
        CHUNKED + b"\r\n2",
    ],
)
async def test_a_slow_request_times_out(sent: bytes) -> None:
    async with serve_edge(GatewayConfig(port=0, read_timeout_s=0.2)) as edge:
        client = await edge.connect()
        client.send(sent)
        assert (await client.answer()).status == 408
        assert await client.at_end() == b""


async def test_trickling_does_not_extend_the_time_for_a_head() -> None:
    async with serve_edge(GatewayConfig(port=0, read_timeout_s=0.3)) as edge:
        client = await edge.connect()
        started = time.monotonic()
        answer = asyncio.create_task(client.answer())
        for byte in b"POST /hot/echo HTTP/1.1\r\nHost: a\r\nx: " + b"y" * 200:
            client.send(bytes([byte]))
            await asyncio.sleep(0.01)
            if answer.done():
                break
        assert (await answer).status == 408
        assert time.monotonic() - started < 1.5


async def test_an_idle_connection_is_closed() -> None:
    async with serve_edge(GatewayConfig(port=0, keepalive_timeout_s=0.1, read_timeout_s=0.2)) as edge:
        used, unused = await edge.connect(), await edge.connect()
        used.post("/hot/echo")
        await used.answer()
        assert await used.at_end() == b""
        assert await unused.at_end() == b""
        assert edge.server.num_connections == 0


async def test_connections_are_bounded() -> None:
    async with serve_edge(GatewayConfig(port=0, max_connections=2)) as edge:
        kept = [await edge.connect() for _ in range(2)]
        for client in kept:
            client.post("/hot/echo")
            await client.answer()
        assert (await (await edge.connect()).answer()).status == 503


def half_close(client: RawClient) -> None:
    client.writer.write_eof()


def full_close(client: RawClient) -> None:
    client.writer.close()


def reset(client: RawClient) -> None:
    sock: socket.socket = client.writer.get_extra_info("socket")
    sock.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, b"\x01\0\0\0\0\0\0\0")
    client.reset()


@pytest.mark.parametrize("leave", [half_close, full_close, reset])
async def test_a_client_that_goes_is_noticed_at_once(leave: object) -> None:
    async with serve_edge() as edge:
        client = await edge.connect()
        client.post("/hot/wait")
        await edge.witness.arrived.wait()
        assert not edge.witness.requests[0].is_disconnected
        left_at = time.monotonic()
        leave(client)  # type: ignore[operator]
        async with asyncio.timeout(2):
            await edge.witness.ended.wait()
        assert edge.witness.gone_at - left_at < 0.1
        assert edge.witness.requests[0].is_disconnected


async def test_a_callback_set_after_the_client_went_is_called() -> None:
    async with serve_edge() as edge:
        client = await edge.connect()
        client.post("/hot/wait")
        await edge.witness.arrived.wait()
        edge.witness.requests[0].on_disconnect(None)
        await client.close()
        await eventually(lambda: edge.witness.requests[0].is_disconnected)
        assert not edge.witness.gone_at
        edge.witness.requests[0].on_disconnect(edge.witness.gone)
        assert edge.witness.gone_at


async def test_a_slow_reader_is_told_of_and_waited_for() -> None:
    async with serve_edge(GatewayConfig(port=0, write_buffer_bytes=100_000)) as edge:
        client = await edge.connect()
        client.post("/hot/flood")
        await edge.witness.arrived.wait()
        assert edge.witness.writable == [False]
        assert not edge.witness.requests[0].is_writable
        edge.witness.proceed.set()
        await edge.witness.ended.wait()
        body = (await client.answer()).body
        assert len(body) % 65536 == 0
        assert edge.witness.requests[0].is_writable


async def test_a_client_that_reads_nothing_is_dropped() -> None:
    config = GatewayConfig(port=0, write_buffer_bytes=100_000, write_timeout_s=0.3)
    async with serve_edge(config) as edge:
        client = await edge.connect()
        client.post("/hot/flood")
        await edge.witness.arrived.wait()
        async with asyncio.timeout(5):
            await edge.witness.proceed.wait()
        assert edge.witness.gone_at
        await edge.witness.ended.wait()


async def test_an_aborted_stream_has_no_clean_end() -> None:
    async with serve_edge() as edge:
        client = await edge.connect()
        client.post("/hot/cut")
        sent = await client.at_end()
        assert sent.endswith(b"4\r\nhalf\r\n")
        client = await edge.connect()
        client.post("/hot/cut", version="1.0")
        with pytest.raises(ConnectionResetError):
            await client.at_end()


async def test_a_failing_handler_is_answered(caplog: pytest.LogCaptureFixture) -> None:
    async with serve_edge() as edge:
        client = await edge.connect()
        client.post("/hot/fail")
        assert (await client.answer()).status == 500
        client.post("/hot/silent")
        assert (await client.answer()).status == 500
        client.post("/hot/fail", b"late")
        assert (await client.at_end()).endswith(b"4\r\nhalf\r\n")
    assert "a fault in a handler" in caplog.text


async def test_a_header_cannot_be_injected() -> None:
    async with serve_edge() as edge:
        client = await edge.connect()
        client.post("/hot/inject")
        answer = await client.answer()
        assert answer.status == 500
        assert "set-cookie" not in answer.headers


async def test_stop_lets_a_request_end_and_closes_the_rest() -> None:
    async with serve_edge() as edge:
        idle, busy = await edge.connect(), await edge.connect()
        idle.post("/hot/echo")
        await idle.answer()
        busy.post("/hot/wait")
        await edge.witness.arrived.wait()
        port = edge.server.port
        stopping = asyncio.create_task(edge.server.stop())
        assert await idle.at_end() == b""
        assert not stopping.done()
        with pytest.raises(OSError, match=r"refused|failed|Errno"):
            await asyncio.open_connection("127.0.0.1", port)
        edge.witness.proceed.set()
        answer = await busy.answer()
        assert answer.body == b"late"
        assert answer.headers["connection"] == "close"
        async with asyncio.timeout(2):
            await stopping


async def test_stop_ends_what_outlasts_its_grace() -> None:
    async with serve_edge(GatewayConfig(port=0, shutdown_grace_s=0.2)) as edge:
        client = await edge.connect()
        client.post("/hot/wait")
        await edge.witness.arrived.wait()
        async with asyncio.timeout(3):
            await edge.server.stop()
        assert edge.witness.gone_at
        assert await client.at_end() == b""
