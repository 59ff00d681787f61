"""The two forms of an answer: a stream of frames, or one body.

The end of a request is recorded before its final usage leaves. A reader that is slow holds up only itself:
its tokens are joined in the engine's stream until it comes for them, and one that takes nothing for too
long is given up.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Awaitable, Callable, Sequence
from typing import Final

from aiohttp import web

from backend.engine.client import EngineDiedError, SequenceRefusedError
from backend.http.calls import Call, Calls, error_word
from backend.http.chunks import ChunkEncoder, Message, encode_completion, error_frame
from backend.http.errors import ReplicaError, engine_died, engine_failed, refused
from backend.http.generation import Delta, Generation, GenerationFailedError

# Less than the transport's high-water mark: so much fits into an empty buffer without waiting.
_NEVER_WAITS: Final = 32 * 1024

_STREAM_HEADERS: Final = {"Content-Type": "text/event-stream; charset=utf-8", "Cache-Control": "no-cache"}


async def send_stream(
    http: web.Request,
    call: Call,
    first: Delta,
    calls: Calls,
    token_bytes: Sequence[bytes],
    *,
    max_stall_s: float,
) -> web.StreamResponse:
    """Answer with frames, from the first delta on.

    Args:
        http: where to answer.
        call: a call whose generation has given its first delta.
        first: that delta.
        calls: the call's keeper.
        token_bytes: the tokenizer's table.
        max_stall_s: how long one write may wait for the reader.
    """
    response = web.StreamResponse(headers=_STREAM_HEADERS)
    await response.prepare(http)
    writer = _Writer(response, http.transport, max_stall_s)
    frames = ChunkEncoder(_completion_id(call), int(time.time()), call.request.model, token_bytes)
    try:
        await _send_frames(writer, frames, call, first, calls)
    except TimeoutError:
        if http.transport is not None:
            http.transport.abort()
    except ConnectionError:
        pass  # the reader has gone; what still runs is stopped when the call is closed
    return response


async def _send_frames(writer: _Writer, frames: ChunkEncoder, call: Call, first: Delta, calls: Calls) -> None:
    generation = _generation(call)
    delta = first
    try:
        while not generation.is_over:
            data = frames.delta(delta)
            if data:
                await writer.write(data)
            delta = await calls.next(call)
    except (SequenceRefusedError, GenerationFailedError, EngineDiedError) as error:
        failure = as_replica_error(error)
        call.error = error_word(failure)
        await writer.write_last(error_frame(failure))
    else:
        usage = calls.finish(call)
        await writer.write(frames.delta(delta) + frames.end(usage))


async def send_whole(
    http: web.Request,
    call: Call,
    first: Delta,
    calls: Calls,
    token_bytes: Sequence[bytes],
    *,
    check: Callable[[Sequence[Message]], Awaitable[None]],
) -> web.StreamResponse:
    """Answer with one body, when everything has been generated; arguments as :func:`send_stream`.

    ``check`` looks at the choices before they count as good.

    Raises:
        ReplicaError: when the engine fails on the way.
    """
    generation = _generation(call)
    messages = [Message() for _ in range(call.request.n)]
    messages[first.index].add(first)
    try:
        while not generation.is_over:
            delta = await calls.next(call)
            messages[delta.index].add(delta)
    except (SequenceRefusedError, GenerationFailedError, EngineDiedError) as error:
        raise as_replica_error(error) from error
    await check(messages)
    body = encode_completion(
        _completion_id(call), int(time.time()), call.request.model, messages, calls.finish(call),
        token_bytes=token_bytes, has_logprobs=call.request.logprobs,
    )  # fmt: skip
    return web.Response(body=body, content_type="application/json")


def as_replica_error(
    error: SequenceRefusedError | GenerationFailedError | EngineDiedError,
) -> ReplicaError:
    """What the engine said, in the words of the wire."""
    if isinstance(error, SequenceRefusedError):
        return refused(error.code, error.message)
    if isinstance(error, GenerationFailedError):
        return engine_failed(str(error))
    return engine_died()


def _completion_id(call: Call) -> str:
    return f"chatcmpl-{call.request.request_id}"


def _generation(call: Call) -> Generation:
    assert call.generation is not None
    return call.generation


class _Writer:
    """Writes frames to one reader.

    Every write raises ConnectionError when the reader has gone, and TimeoutError when it takes nothing for
    ``max_stall_s``.
    """

    def __init__(
        self, response: web.StreamResponse, transport: asyncio.Transport | None, max_stall_s: float
    ) -> None:
        self._response = response
        self._transport = transport
        self._max_stall_s = max_stall_s

    async def write(self, data: bytes) -> None:
        transport = self._transport
        if transport is None:
            raise ConnectionResetError("the reader has gone")
        if len(data) < _NEVER_WAITS and transport.get_write_buffer_size() == 0:
            # A reader that keeps up: nothing is waiting, so this cannot wait either and needs no clock.
            await self._response.write(data)
            return
        async with asyncio.timeout(self._max_stall_s):
            await self._response.write(data)

    async def write_last(self, data: bytes) -> None:
        """Write and close the connection afterwards."""
        self._response.force_close()
        await self.write(data)
