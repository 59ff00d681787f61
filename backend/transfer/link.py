"""A connection between two replicas: both prove that they know the pool's secret, then send sealed frames.

The server speaks first (32 random bytes), the client answers with as many of its own and an HMAC over both,
the server with its HMAC; the secret itself never leaves a process. Every frame has a tag over its direction,
its number and its content under a key of this connection, so that frames cannot be changed, left out, swapped
or played back. Contents are not encrypted: links belong on the private network that replicas share.

A frame is a message and, behind it, any bytes. Lengths are checked before anything is allocated.
"""

from __future__ import annotations

import asyncio
import hashlib
import hmac
import secrets
import struct
from hashlib import blake2b
from typing import Generic, TypeVar

import msgspec

_HEAD = struct.Struct("<II")
_COUNT = struct.Struct("<BQ")
_NONCE_BYTES = 32
_TAG_BYTES = 16

Message = TypeVar("Message")


class LinkError(ConnectionError):
    """The other side is gone, or not what it should be; the link is of no use any more."""


class Link(Generic[Message]):
    """One end of a connection whose handshake is over. ``max_frame_bytes`` bounds what is received."""

    def __init__(
        self,
        reader: asyncio.StreamReader,
        writer: asyncio.StreamWriter,
        key: bytes,
        decoder: msgspec.msgpack.Decoder[Message],
        *,
        is_server: bool,
        max_frame_bytes: int,
    ) -> None:
        self._reader = reader
        self._writer = writer
        self._key = key
        self._decoder = decoder
        self._max_frame_bytes = max_frame_bytes
        self._sends_as, self._hears_as = (1, 0) if is_server else (0, 1)
        self._num_sent = self._num_heard = 0

    async def send(self, message: object, content: bytes | memoryview = b"") -> None:
        """Send a frame; returns when it is the network's.

        Raises:
            LinkError: nobody is there to take it.
        """
        head = msgspec.msgpack.encode(message)
        view = memoryview(content)
        tag = self._tag(self._sends_as, self._num_sent, head, view)
        self._num_sent += 1
        self._writer.write(_HEAD.pack(len(head), len(view)) + tag + head)
        if len(view):
            self._writer.write(view)
        try:
            await self._writer.drain()
        except OSError as error:
            raise LinkError(f"the other replica is gone: {type(error).__name__}") from error

    async def receive(self) -> tuple[Message, bytes]:
        """The next frame.

        Raises:
            LinkError: there is none, or it is not what the other side sent.
        """
        num_head, num_content = _HEAD.unpack(await self._read(_HEAD.size))
        if num_head + num_content > self._max_frame_bytes:
            raise LinkError(f"a frame of {num_head + num_content} bytes is too long")
        tag = await self._read(_TAG_BYTES)
        head = await self._read(num_head)
        content = await self._read(num_content)
        expected = self._tag(self._hears_as, self._num_heard, head, memoryview(content))
        self._num_heard += 1
        if not hmac.compare_digest(tag, expected):
            raise LinkError("a frame was changed on its way")
        try:
            return self._decoder.decode(head), content
        except msgspec.DecodeError as error:
            raise LinkError(f"the other replica speaks another version: {error}") from error

    def close(self) -> None:
        """Cut the connection."""
        self._writer.close()

    async def _read(self, count: int) -> bytes:
        try:
            return await self._reader.readexactly(count)
        except (asyncio.IncompleteReadError, OSError) as error:
            raise LinkError("the other replica has closed the link") from error

    def _tag(self, direction: int, number: int, head: bytes, content: memoryview) -> bytes:
        state = blake2b(_COUNT.pack(direction, number) + _HEAD.pack(len(head), len(content)), key=self._key,
                        digest_size=_TAG_BYTES)  # fmt: skip
        state.update(head)
        state.update(content)
        return state.digest()


async def greet_as_server(reader: asyncio.StreamReader, writer: asyncio.StreamWriter, secret: str) -> bytes:
    """Let a client prove itself; the key of the connection.

    Raises:
        LinkError: it cannot.
    """
    ours = secrets.token_bytes(_NONCE_BYTES)
    writer.write(ours)
    try:
        answer = await reader.readexactly(2 * _NONCE_BYTES)
    except (asyncio.IncompleteReadError, OSError) as error:
        raise LinkError("the other replica has closed the link") from error
    both = ours + answer[:_NONCE_BYTES]
    if not hmac.compare_digest(answer[_NONCE_BYTES:], _prove(secret, b"client", both)):
        raise LinkError("who connected does not know this pool's secret")
    writer.write(_prove(secret, b"server", both))
    return _prove(secret, b"key", both)


async def greet_as_client(reader: asyncio.StreamReader, writer: asyncio.StreamWriter, secret: str) -> bytes:
    """Prove ourselves and let the server do so; the key of the connection.

    Raises:
        LinkError: one of the two failed.
    """
    ours = secrets.token_bytes(_NONCE_BYTES)
    try:
        both = await reader.readexactly(_NONCE_BYTES) + ours
        writer.write(ours + _prove(secret, b"client", both))
        answer = await reader.readexactly(_NONCE_BYTES)
    except (asyncio.IncompleteReadError, OSError) as error:
        raise LinkError("the other replica refuses this pool's secret, or is gone") from error
    if not hmac.compare_digest(answer, _prove(secret, b"server", both)):
        raise LinkError("who answers does not know this pool's secret")
    return _prove(secret, b"key", both)


def _prove(secret: str, role: bytes, nonces: bytes) -> bytes:
    return hmac.new(secret.encode(), b"embergate.link.1\0" + role + b"\0" + nonces, hashlib.sha256).digest()
