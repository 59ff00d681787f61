from __future__ import annotations

import asyncio
import os
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

import msgspec
import pytest

from backend.engine.messages import MediaSpan
from backend.transfer.exchange import ExchangeError, create_exchange, open_exchange
from backend.transfer.link import Link, LinkError, greet_as_client, greet_as_server
from backend.transfer.payload import KvLayout
from backend.transfer.prompts import Prompt
from backend.transfer.protocol import Done, FromPrefill, Refused
from backend.transfer.service import split_address

LAYOUT = KvLayout("m", "uint8", 1, 16, (((100,),),))


def span_of(start: int, num_tokens: int) -> MediaSpan:
    return MediaSpan(start=start, num_tokens=num_tokens, rows=1, columns=1, patches=b"", digest=b"i" * 32)


class TestExchanges:
    def test_what_one_process_writes_another_reads(self) -> None:
        made = create_exchange(LAYOUT, 10 * LAYOUT.record_bytes)
        opened = open_exchange(made.info)
        made.slot(9)[:3] = b"abc"
        assert bytes(opened.slot(9)[:3]) == b"abc"
        assert bytes(opened.slot(8)[:3]) == b"\0\0\0"
        assert (made.info.num_slots, made.info.num_outgoing) == (10, 5)
        for number in (-1, 10):
            with pytest.raises(ExchangeError):
                made.slot(number)
        opened.close()

    def test_something_else_at_its_place_is_noticed(self, tmp_path: Path) -> None:
        info = create_exchange(LAYOUT, 4 * LAYOUT.record_bytes).info
        other = create_exchange(LAYOUT, 4 * LAYOUT.record_bytes).info
        short = tmp_path / "short"
        short.write_bytes(info.proof)
        for path in (other.path, str(short), str(tmp_path / "nothing"), f"/proc/{os.getpid()}/fd/9999"):
            with pytest.raises(ExchangeError):
                open_exchange(msgspec.structs.replace(info, path=path))

    def test_memory_for_less_than_two_blocks_is_refused_with_the_setting(self) -> None:
        with pytest.raises(ValueError, match=r"transfer\.buffer_mib"):
            create_exchange(LAYOUT, LAYOUT.record_bytes)


@asynccontextmanager
async def linked(
    secret: str = "s", *, max_frame_bytes: int = 1000
) -> AsyncIterator[tuple[Link[FromPrefill], asyncio.StreamWriter]]:
    """A client's link, and the server's bare writer behind its handshake."""
    writers: asyncio.Queue[asyncio.StreamWriter] = asyncio.Queue()

    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        try:
            key = await greet_as_server(reader, writer, "s")
        except LinkError:
            writer.close()
            await writer.wait_closed()
            return
        link = Link(reader, writer, key, msgspec.msgpack.Decoder(Done), is_server=True, max_frame_bytes=1000)
        await link.send(Refused("first"), b"content")
        writers.put_nowait(writer)

    server = await asyncio.start_server(serve, "127.0.0.1", 0)
    reader, writer = await asyncio.open_connection(*server.sockets[0].getsockname())
    try:
        key = await greet_as_client(reader, writer, secret)
        decoder = msgspec.msgpack.Decoder(FromPrefill)
        link = Link(reader, writer, key, decoder, is_server=False, max_frame_bytes=max_frame_bytes)
        other = await writers.get()
        yield link, other
        other.close()
        await asyncio.gather(other.wait_closed(), return_exceptions=True)
    finally:
        writer.close()
        await asyncio.gather(writer.wait_closed(), return_exceptions=True)
        server.close()


class TestLinks:
    async def test_frames_arrive_as_they_were_sent(self) -> None:
        async with linked() as (link, other):
            assert await link.receive() == (Refused("first"), b"content")
            other.close()
            with pytest.raises(LinkError, match="closed"):
                await link.receive()

    async def test_another_secret_is_no_link(self) -> None:
        with pytest.raises(LinkError, match="secret"):
            async with linked("another"):
                pass

    async def test_a_frame_of_somebody_else_is_refused(self) -> None:
        async with linked() as (link, other):
            await link.receive()
            head = msgspec.msgpack.encode(Refused("first"))
            other.write(len(head).to_bytes(4, "little") + bytes(4) + bytes(16) + head)
            with pytest.raises(LinkError, match="changed"):
                await link.receive()

    async def test_a_length_beyond_the_limit_is_not_waited_for(self) -> None:
        async with linked(max_frame_bytes=10) as (link, _):
            with pytest.raises(LinkError, match="too long"):
                await link.receive()


class TestPrompts:
    def test_what_is_asked_for_are_the_full_blocks_before_the_last_token(self) -> None:
        for length, expected in ((1, 0), (16, 0), (17, 17), (32, 17), (33, 33)):
            head = Prompt(list(range(length)), b"salt").head_for(16)
            assert len(head.token_ids) == expected
            assert len(head.digests(16)) == expected // 16

    def test_it_ends_within_no_image(self) -> None:
        prompt = Prompt(list(range(70)), b"", (span_of(20, 20),))
        assert len(prompt.head_for(16).token_ids) == 65
        assert prompt.head_for(16).media == prompt.media
        cut = Prompt(list(range(40)), b"", (span_of(20, 20),)).head_for(16)
        assert (len(cut.token_ids), cut.media) == (17, ())

    def test_salts_and_images_are_in_the_digests(self) -> None:
        tokens = list(range(33))
        plain, salted = Prompt(tokens).digests(16), Prompt(tokens, b"x").digests(16)
        seen = Prompt(tokens, b"", (span_of(20, 4),)).digests(16)
        assert plain[0] == seen[0]
        assert plain[1] != seen[1]
        assert not set(plain) & set(salted)


@pytest.mark.parametrize("text", ["", "host", "host:x", ":80", "host:0", "host:65536"])
def test_what_is_no_address_is_refused(text: str) -> None:
    with pytest.raises(ValueError, match="HOST:PORT"):
        split_address(text)


def test_addresses_of_both_kinds() -> None:
    assert split_address("10.0.0.1:80") == ("10.0.0.1", 80)
    assert split_address("[::1]:80") == ("::1", 80)
