"""The guard of fetches: names that change their addresses, addresses in disguise, and hosts on a list."""

from __future__ import annotations

import asyncio
import base64
import socket
import ssl
from collections.abc import AsyncIterator, Sequence

import pytest
from aiohttp import web
from yarl import URL

from gateway.config import ImagesConfig
from gateway.images.addresses import AddressGuard
from gateway.images.fetcher import (
    FetchesBusyError,
    ImageFetcher,
    ImageNotFetchedError,
    resolve,
    sniff,
)
from gateway.images.hosts import HostList, UrlNotAllowedError

GIF = b"GIF89a" + bytes(10)


class Names:
    """A name server that gives another answer each time it is asked; the last for ever."""

    def __init__(self, *answers: Sequence[str]) -> None:
        self._answers = list(answers)
        self.num_asked = 0

    async def __call__(self, host: str, port: int) -> Sequence[str]:
        self.num_asked += 1
        return self._answers.pop(0) if len(self._answers) > 1 else self._answers[0]


def takes_all(num_bytes: int) -> bool:
    return True


@pytest.fixture
async def port() -> AsyncIterator[int]:
    """A host on every loopback address that answers with a GIF."""

    async def answer(request: web.Request) -> web.Response:
        return web.Response(body=GIF)

    app = web.Application()
    app.router.add_get("/{name:.*}", answer)
    runner = web.AppRunner(app, access_log=None)
    await runner.setup()
    await web.TCPSite(runner, "0.0.0.0", 0).start()
    yield int(runner.addresses[0][1])
    await runner.cleanup()


def fetcher(names: Names, *, allowed: Sequence[str] = (), **limits: object) -> ImageFetcher:
    config = ImagesConfig(fetch_timeout_s=1.0, **limits)  # type: ignore[arg-type]
    return ImageFetcher(config, AddressGuard(allowed), names)


@pytest.mark.parametrize(
    "address",
    [
        "0.0.0.0", "10.1.2.3", "100.64.0.1", "127.0.0.1", "127.8.8.8", "168.63.129.16", "169.254.169.254",
        "172.16.0.1", "192.0.0.8", "192.0.2.1", "192.168.1.1", "198.18.0.1", "203.0.113.1", "224.0.0.1",
        "240.0.0.1", "255.255.255.255", "::", "::1", "::127.0.0.1", "::ffff:127.0.0.1", "::ffff:8.8.8.8",
        "64:ff9b::7f00:1", "64:ff9b::808:808", "2001::7f00:1", "2001:db8::1", "2002:7f00:1::",
        "2002:808:808::",
        "fc00::1", "fd00:ec2::254", "fe80::1", "fe80::1%lo", "fec0::1", "ff02::1", "100::1", "", "localhost",
        "2130706433", "0x7f.1", "0177.0.0.1", "127.1",
    ],
)  # fmt: skip
def test_addresses_that_are_not_of_the_internet_are_not_allowed(address: str) -> None:
    assert not AddressGuard().allows(address)


@pytest.mark.parametrize(
    "address", ["8.8.8.8", "1.1.1.1", "2606:4700:4700::1111", "2a00:1450:4001:82b::200e"]
)
def test_addresses_of_the_internet_are_allowed(address: str) -> None:
    assert AddressGuard().allows(address)


def test_an_operator_can_allow_a_network_and_nothing_beside_it() -> None:
    guard = AddressGuard(["10.2.0.0/16", "fd00::/8"])
    assert guard.allows("10.2.3.4")
    assert guard.allows("fd00::1")
    assert not guard.allows("10.3.0.1")
    assert not guard.allows("::ffff:10.2.3.4")
    with pytest.raises(ValueError, match=r"10\.2\.0\.1"):
        AddressGuard(["10.2.0.1/16"])


@pytest.mark.parametrize(
    "host", ["2130706433", "0x7f000001", "0177.0.0.1", "127.1", "localhost", "::ffff:127.0.0.1", "::1"]
)
async def test_spellings_of_loopback_resolve_to_what_the_guard_refuses(host: str) -> None:
    try:
        addresses = await resolve(host, 80)
    except OSError:
        return  # this system's resolver knows no such spelling, so there is nothing to connect to
    assert addresses
    assert not any(map(AddressGuard().allows, addresses))


async def test_an_image_is_fetched_from_the_address_that_was_checked(port: int) -> None:
    names = Names(["127.0.0.2"])
    url = await fetcher(names, allowed=["127.0.0.2/32"]).fetch(URL(f"http://cats.test:{port}/"), takes_all)
    assert url == f"data:image/gif;base64,{base64.b64encode(GIF).decode()}"


async def test_a_name_is_resolved_once_so_that_it_cannot_change_its_mind(port: int) -> None:
    """DNS rebinding: good when it is checked, the machine itself when it is connected to."""
    names = Names(["127.0.0.2"], ["127.0.0.1"])
    await fetcher(names, allowed=["127.0.0.2/32"]).fetch(URL(f"http://cats.test:{port}/"), takes_all)
    assert names.num_asked == 1
    changed = fetcher(names, allowed=["127.0.0.2/32"]).fetch(URL(f"http://cats.test:{port}/"), takes_all)
    with pytest.raises(ImageNotFetchedError, match="address that is not allowed"):
        await changed


@pytest.mark.parametrize(
    "addresses", [["127.0.0.1"], ["8.8.8.8", "127.0.0.1"], ["::ffff:127.0.0.1"], ["169.254.169.254"], []]
)
async def test_one_bad_address_condemns_a_name(port: int, addresses: list[str]) -> None:
    fetch = fetcher(Names(addresses)).fetch(URL(f"http://cats.test:{port}/"), takes_all)
    with pytest.raises(ImageNotFetchedError, match="address that is not allowed"):
        await fetch


async def test_an_address_in_the_url_is_connected_to_only_when_it_was_checked(port: int) -> None:
    names = Names(["127.0.0.2"])  # what no resolver would say of the name 127.0.0.1
    fetch = fetcher(names, allowed=["127.0.0.2/32"]).fetch(URL(f"http://127.0.0.1:{port}/"), takes_all)
    with pytest.raises(ImageNotFetchedError, match="could not be reached"):
        await fetch


async def test_a_certificate_must_be_of_the_name_and_not_of_the_address() -> None:
    """The pinned address is only where to connect; who is there is still asked by name."""
    seen: list[str | None] = []
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.sni_callback = lambda _connection, name, _context: seen.append(name)
    server = await asyncio.start_server(lambda _reader, writer: writer.close(), "127.0.0.1", 0, ssl=context)
    port = server.sockets[0].getsockname()[1]
    fetch = fetcher(Names(["127.0.0.1"]), allowed=["127.0.0.0/8"]).fetch(
        URL(f"https://cats.test:{port}/"), takes_all
    )
    with pytest.raises(ImageNotFetchedError, match="could not be reached"):
        await fetch
    assert seen == ["cats.test"]
    server.close()
    await server.wait_closed()


async def test_silence_is_bounded() -> None:
    """A host that takes the connection and never says a word."""
    with socket.create_server(("127.0.0.1", 0)) as silent:
        fetch = fetcher(Names(["127.0.0.1"]), allowed=["127.0.0.0/8"]).fetch(
            URL(f"http://cats.test:{silent.getsockname()[1]}/"), takes_all
        )
        with pytest.raises(ImageNotFetchedError, match="longer than 1 s"):
            await fetch


async def test_a_slow_name_server_is_bounded_and_the_next_is_told_that_it_waits_in_vain() -> None:
    async def never(host: str, port: int) -> Sequence[str]:
        await asyncio.sleep(60)
        return []

    config = ImagesConfig(fetch_timeout_s=0.3, max_concurrent_fetches=1)
    slow = ImageFetcher(config, AddressGuard(), never)
    first, second = await asyncio.gather(
        slow.fetch(URL("http://a.test/"), takes_all),
        slow.fetch(URL("http://b.test/"), takes_all),
        return_exceptions=True,
    )
    assert isinstance(first, ImageNotFetchedError)
    assert isinstance(second, FetchesBusyError)


def test_a_host_list_means_names_and_not_their_spellings() -> None:
    hosts = HostList(["cats.example", "*.pets.example", "odd.example:8443"], allows_plain_http=False)
    for url in (
        "https://cats.example/a.png",
        "https://CATS.example./a.png",
        "https://cats.example:443/a.png",
        "https://a.b.pets.example/",
        "https://odd.example:8443/",
    ):
        assert hosts.parse(url)
    for url in (
        "http://cats.example/a.png",
        "https://cats.example:8443/",
        "https://odd.example/",
        "https://pets.example/",
        "https://xpets.example/",
        "https://cats.example.evil/",
        "https://evil/cats.example",
        "https://evil#cats.example",
        "https://evil?cats.example",
        "https://cats.example@evil/",
        "https://evil\\@cats.example:1/",
        "https://:443/",
        "cats.example/a.png",
    ):
        with pytest.raises(UrlNotAllowedError):
            hosts.parse(url)


@pytest.mark.parametrize(
    "entry", ["", "*", "https://a.example", "a.example/x", "*.", "a b", "[::1]", "a.example:x"]
)
def test_an_entry_that_is_no_host_is_an_error_of_the_configuration(entry: str) -> None:
    with pytest.raises(ValueError, match=r"gateway\.images\.allowed_hosts"):
        HostList([entry], allows_plain_http=True)


def test_the_kind_of_an_image_is_what_its_bytes_say() -> None:
    assert sniff(b"\x89PNG\r\n\x1a\n....") == "image/png"
    assert sniff(b"\xff\xd8\xff\xe0........") == "image/jpeg"
    assert sniff(b"GIF87a......") == "image/gif"
    assert sniff(b"RIFF\x10\x00\x00\x00WEBPVP8 ") == "image/webp"
    for head in (b"", b"<svg xmlns", b"BM", b"%PDF", b"RIFF\x10\x00\x00\x00WAVE", b"II*\x00"):
        with pytest.raises(ImageNotFetchedError):
            sniff(head)
