"""Fetches one image: a host is resolved once, every address that it has is checked, and only those are
connected to. Nothing is followed, decoded or kept.
"""

from __future__ import annotations

import asyncio
import binascii
import socket
from collections.abc import Awaitable, Callable, Sequence
from typing import Any

import aiohttp
from aiohttp.abc import AbstractResolver, ResolveResult
from yarl import URL

from gateway.config import ImagesConfig
from gateway.images.addresses import AddressGuard

Resolve = Callable[[str, int], Awaitable[Sequence[str]]]
"""Host and port to addresses. Raises OSError."""

_MIN_HEAD_BYTES = 12
_PIECE_BYTES = 64 * 1024
_HEADERS = {"accept": "image/png, image/jpeg, image/webp, image/gif", "accept-encoding": "identity"}


class ImageNotFetchedError(Exception):
    """No image came of a URL; the message says why, in words that can follow a colon."""


class FetchesBusyError(Exception):
    """Too many fetches are in progress."""


async def resolve(host: str, port: int) -> list[str]:
    """All addresses of a host, by the system's resolver. Raises OSError."""
    found = await asyncio.get_running_loop().getaddrinfo(host, port, type=socket.SOCK_STREAM)
    return list(dict.fromkeys(str(address[0]) for *_, address in found))


class ImageFetcher:
    """Fetches images within the limits of the configuration.

    Args:
        config: the limits.
        guard: decides about addresses.
        resolve: how names become addresses; tests give another.
    """

    def __init__(self, config: ImagesConfig, guard: AddressGuard, resolve: Resolve = resolve) -> None:
        self._config = config
        self._guard = guard
        self._resolve = resolve
        self._slots = asyncio.Semaphore(config.max_concurrent_fetches)

    async def fetch(self, url: URL, take: Callable[[int], bool]) -> str:
        """An image as a ``data:`` URL of what its bytes say it is.

        Args:
            url: of a host that may be asked.
            take: reserves memory for so many bytes more; False when there is none.

        Raises:
            ImageNotFetchedError: naming what is in the way.
            FetchesBusyError: too many others are in the way.
        """
        is_begun = False
        limit_s = self._config.fetch_timeout_s
        try:
            async with asyncio.timeout(limit_s), self._slots:
                is_begun = True
                return await self._fetch(url, take)
        except TimeoutError:
            if not is_begun:
                raise FetchesBusyError from None
            raise ImageNotFetchedError(f"the image took longer than {limit_s:g} s to fetch") from None

    async def _fetch(self, url: URL, take: Callable[[int], bool]) -> str:
        addresses = await self._addresses(url)
        connector = aiohttp.TCPConnector(
            resolver=_Pinned(addresses),
            use_dns_cache=False,
            force_close=True,
            socket_factory=lambda found: _open_socket(found, addresses),
        )
        try:
            async with (
                aiohttp.ClientSession(
                    connector=connector,
                    cookie_jar=aiohttp.DummyCookieJar(),
                    headers=_HEADERS,
                    skip_auto_headers=("user-agent",),
                    auto_decompress=False,
                    timeout=aiohttp.ClientTimeout(total=None),
                ) as session,
                session.get(url, allow_redirects=False) as response,
            ):
                self._check(response)
                return await self._read(response, take)
        except (aiohttp.ClientError, OSError, ValueError) as error:
            raise ImageNotFetchedError("the image's host could not be reached") from error

    async def _addresses(self, url: URL) -> frozenset[str]:
        host, port = url.raw_host, url.port
        assert host is not None
        assert port is not None
        try:
            addresses = frozenset(await self._resolve(host, port))
        except (OSError, UnicodeError):
            raise ImageNotFetchedError("the image's host has no address") from None
        # One address that is not allowed condemns the name: whoever answers for it is not to be trusted.
        if not addresses or not all(map(self._guard.allows, addresses)):
            raise ImageNotFetchedError("the image's host has an address that is not allowed")
        return addresses

    def _check(self, response: aiohttp.ClientResponse) -> None:
        if 300 <= response.status < 400:
            raise ImageNotFetchedError("the image's host redirects elsewhere, which is not followed")
        if response.status != 200:
            raise ImageNotFetchedError(f"the image's host answers with status {response.status}")
        if response.headers.get("content-encoding", "identity") != "identity":
            raise ImageNotFetchedError("the image's host compresses it, which was not asked for")
        if (response.content_length or 0) > self._config.max_fetched_bytes:
            raise self._too_large()

    async def _read(self, response: aiohttp.ClientResponse, take: Callable[[int], bool]) -> str:
        """Encode what comes as it comes, so that no image holds up the loop."""
        encoded: list[str] = []
        left = b""
        num_bytes = 0
        kind = ""
        while piece := await response.content.read(_PIECE_BYTES):
            num_bytes += len(piece)
            if num_bytes > self._config.max_fetched_bytes:
                raise self._too_large()
            if not take(len(piece)):
                raise FetchesBusyError
            left += piece
            if not kind:
                if len(left) < _MIN_HEAD_BYTES:
                    continue
                kind = sniff(left)
            num_whole = len(left) // 3 * 3
            encoded.append(_base64(left[:num_whole]))
            left = left[num_whole:]
        kind = kind or sniff(left)
        return "".join((f"data:{kind};base64,", *encoded, _base64(left)))

    def _too_large(self) -> ImageNotFetchedError:
        return ImageNotFetchedError(f"the image is larger than {self._config.max_fetched_bytes} bytes")


def sniff(head: bytes) -> str:
    """The media type that the first bytes of an image tell, whatever its host calls it.

    Raises:
        ImageNotFetchedError: of none that a replica reads.
    """
    if head.startswith(b"\x89PNG\r\n\x1a\n"):
        return "image/png"
    if head.startswith(b"\xff\xd8\xff"):
        return "image/jpeg"
    if head.startswith((b"GIF87a", b"GIF89a")):
        return "image/gif"
    if head.startswith(b"RIFF") and head[8:12] == b"WEBP":
        return "image/webp"
    raise ImageNotFetchedError("what is there is not a PNG, JPEG, WebP or GIF image")


def _base64(data: bytes) -> str:
    return binascii.b2a_base64(data, newline=False).decode("ascii")


class _Pinned(AbstractResolver):
    """Resolves every name to the addresses that were checked."""

    def __init__(self, addresses: frozenset[str]) -> None:
        self._addresses = addresses

    async def resolve(
        self, host: str, port: int = 0, family: socket.AddressFamily = socket.AF_INET
    ) -> list[ResolveResult]:
        return [
            ResolveResult(
                hostname=host,
                host=address,
                port=port,
                family=socket.AF_INET6 if ":" in address else socket.AF_INET,
                proto=socket.IPPROTO_TCP,
                flags=socket.AI_NUMERICHOST | socket.AI_NUMERICSERV,
            )
            for address in sorted(self._addresses)
        ]

    async def close(self) -> None:
        return None


def _open_socket(found: tuple[Any, ...], addresses: frozenset[str]) -> socket.socket:
    """The last look before a connection is made: also when a host's name is an address itself."""
    family, kind, protocol, _, address = found
    if address[0] not in addresses:
        raise OSError("this address was not checked")
    return socket.socket(family, kind, protocol)
