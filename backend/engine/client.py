"""The HTTP process's end of the engine: starts it as a child process and streams tokens out of it.

Imports no torch. One :class:`EngineClient` owns one engine process and one socket to it. All methods belong
to the event loop it was started on; none of them blocks. When the engine process ends, for whatever reason,
``died`` resolves and every open stream raises :class:`EngineDiedError`; when this process ends, the socket
closes and the engine exits by itself.
"""

from __future__ import annotations

import asyncio
import itertools
import os
import socket
import sys
from collections.abc import AsyncIterator, Callable, Mapping
from dataclasses import dataclass
from types import MappingProxyType

import msgspec

from backend.config import BackendConfig
from backend.engine.frames import FrameBuffer, FrameError, encode_frame
from backend.engine.messages import (
    AbortSequences,
    Configure,
    EngineInfo,
    EngineStats,
    FromEngine,
    RefusalCode,
    SequenceFinish,
    SequenceRequest,
    StartProgress,
    StepOutputs,
    ToExchange,
    TokenOutput,
    TransferReport,
)

WORKER_MODULE = "backend.engine.worker"

ENGINE_ENVIRONMENT: Mapping[str, str] = MappingProxyType({"OMP_WAIT_POLICY": "passive"})
"""Defaults of the engine's environment. OpenMP threads that spin for each other are fast on an idle machine
and ruinous on a busy one: with the cores shared, a step of 20 ms was seen to take 400."""

STOP_GRACE_S = 10.0
"""How long an engine process that has lost its parent may take to exit before it is killed."""


class EngineStartError(RuntimeError):
    """The engine process could not start; the message names what to fix."""


class EngineDiedError(RuntimeError):
    """The engine process is gone; the sequence's answer is incomplete."""


class SequenceRefusedError(Exception):
    """The engine did not admit the sequence. ``code`` says why; nothing was computed, nothing is owed."""

    def __init__(self, code: RefusalCode, message: str) -> None:
        super().__init__(message)
        self.code = code
        self.message = message


@dataclass(frozen=True, slots=True)
class EngineDeath:
    """How the engine process ended: its exit code (negative: killed by that signal)."""

    exit_code: int
    message: str


class SequenceStream(AsyncIterator[TokenOutput]):
    """The tokens of one sequence, as they come.

    Iteration ends after the output that has a ``finish_reason``; it raises :class:`SequenceRefusedError` when
    the sequence was never admitted and :class:`EngineDiedError` when the engine process is gone. A reader
    that is slower than the engine gets several tokens in one output, so what is held is bounded by
    ``max_tokens``. One reader at a time.

    To stop early call :meth:`abort` and keep iterating: the last output says "abort" (or how the sequence had
    ended by itself before), and the counts are then exact.
    """

    def __init__(self, client: EngineClient, sequence_id: int) -> None:
        self.sequence_id = sequence_id
        self.num_generated_tokens = 0
        """Tokens received so far; all of them once iteration has ended."""
        self.cached_prompt_tokens = 0
        self.cached_head = b""
        self.finish_reason: SequenceFinish | None = None
        self._client = client
        self._pending: TokenOutput | None = None
        self._failure: EngineDiedError | None = None
        self._waiter: asyncio.Future[None] | None = None

    @property
    def is_over(self) -> bool:
        """Whether the engine is done with the sequence (outputs may still wait to be read)."""
        return self.finish_reason is not None or self._failure is not None

    def abort(self) -> None:
        """Ask the engine to stop the sequence and free its blocks. Idempotent; belongs in a ``finally``."""
        self._client.abort(self.sequence_id)

    def __aiter__(self) -> SequenceStream:
        return self

    async def __anext__(self) -> TokenOutput:
        while self._pending is None:
            if self._failure is not None:
                raise self._failure
            if self.finish_reason is not None:
                raise StopAsyncIteration
            self._waiter = asyncio.get_running_loop().create_future()
            try:
                await self._waiter
            finally:
                self._waiter = None
        output, self._pending = self._pending, None
        if output.refusal is not None:
            raise SequenceRefusedError(output.refusal, output.message)
        return output

    def _push(self, output: TokenOutput) -> None:
        self.num_generated_tokens += len(output.token_ids)
        self.cached_prompt_tokens = output.cached_prompt_tokens
        self.cached_head = output.cached_head or self.cached_head
        self.finish_reason = output.finish_reason
        self._pending = output if self._pending is None else _joined(self._pending, output)
        self._wake()

    def _fail(self, error: EngineDiedError) -> None:
        self._failure = error
        self._wake()

    def _wake(self) -> None:
        if self._waiter is not None and not self._waiter.done():
            self._waiter.set_result(None)


def _joined(first: TokenOutput, second: TokenOutput) -> TokenOutput:
    """Two outputs as one, for a reader that has not come for the first yet."""
    first.token_ids.extend(second.token_ids)
    if first.logprobs is not None and second.logprobs is not None:
        first.logprobs.extend(second.logprobs)
    return msgspec.structs.replace(
        second, token_ids=first.token_ids, logprobs=first.logprobs, queue_wait_s=first.queue_wait_s
    )


class EngineClient:
    """The running engine of this replica. Build it with :meth:`start`, end it with :meth:`close`."""

    def __init__(
        self, process: asyncio.subprocess.Process, on_progress: Callable[[StartProgress], None]
    ) -> None:
        loop = asyncio.get_running_loop()
        self.died: asyncio.Future[EngineDeath] = loop.create_future()
        """Resolves when the engine process has ended (after :meth:`close` too)."""
        self._process = process
        self._on_progress = on_progress
        self._ready: asyncio.Future[EngineInfo] = loop.create_future()
        self._transport: asyncio.Transport | None = None
        self._streams: dict[int, SequenceStream] = {}
        self._stats = EngineStats()
        self._on_transfers: Callable[[TransferReport], None] = lambda report: None
        self._ids = itertools.count(1)
        self._failure = "the engine process has ended"
        self._killer: asyncio.TimerHandle | None = None
        self._reaper = loop.create_task(self._reap())

    @classmethod
    async def start(
        cls,
        config: BackendConfig,
        on_progress: Callable[[StartProgress], None] = lambda progress: None,
        *,
        worker_module: str = WORKER_MODULE,
    ) -> EngineClient:
        """Start an engine process and wait until its model is loaded.

        Args:
            config: what to load; its pool token does not leave this process.
            on_progress: called with each stage of the start.
            worker_module: the module to run as the engine process.

        Raises:
            EngineStartError: when it cannot start (its message comes from the engine), or takes longer than
                ``config.start_timeout_s``.
        """
        ours, process = await _spawn(worker_module)
        client = cls(process, on_progress)
        try:
            await client._connect(ours, config)
            async with asyncio.timeout(config.start_timeout_s):
                await asyncio.shield(client._ready)
        except TimeoutError:
            await client.close()
            raise EngineStartError(f"the engine was not ready within {config.start_timeout_s:g} s") from None
        except BaseException:
            await client.close()
            raise
        return client

    @property
    def info(self) -> EngineInfo:
        """The limits of the loaded engine."""
        return self._ready.result()

    @property
    def is_alive(self) -> bool:
        return self._transport is not None and not self.died.done()

    @property
    def num_open(self) -> int:
        """Sequences submitted and not over: waiting and running ones."""
        return len(self._streams)

    def stats(self) -> EngineStats:
        """The engine's figures as of its last step; no round trip."""
        return self._stats

    def new_sequence_id(self) -> int:
        """An id that no other sequence of this engine has."""
        return next(self._ids)

    def submit(self, request: SequenceRequest) -> SequenceStream:
        """Hand a sequence to the engine.

        Raises:
            SequenceRefusedError: when the batch and the queue are full. Every other refusal comes out of the
                stream, before its first token.
            EngineDiedError: when the engine process is gone.
        """
        transport = self._transport
        if transport is None:
            raise EngineDiedError(self._failure)
        info = self.info
        if len(self._streams) >= info.max_running + info.max_waiting:
            raise SequenceRefusedError(
                "queue_full", f"{len(self._streams)} sequences are running or waiting already"
            )
        if request.sequence_id in self._streams:
            raise ValueError(f"sequence_id: {request.sequence_id} is in use")
        stream = SequenceStream(self, request.sequence_id)
        transport.write(encode_frame(request))
        self._streams[request.sequence_id] = stream
        return stream

    def abort(self, sequence_id: int) -> None:
        """Stop a sequence. Does nothing when it is over, was never submitted, or is being stopped already."""
        if self._transport is not None and sequence_id in self._streams:
            self._transport.write(encode_frame(AbortSequences([sequence_id])))

    def tell(self, message: ToExchange) -> None:
        """Say something about blocks on their way; nothing happens when the engine process is gone."""
        if self._transport is not None:
            self._transport.write(encode_frame(message))

    def on_transfers(self, callback: Callable[[TransferReport], None]) -> None:
        """Call ``callback`` with every report of blocks on their way."""
        self._on_transfers = callback

    async def close(self) -> None:
        """End the engine process: it exits after the step in progress, or is killed after a grace."""
        self._lose_connection("the engine was shut down")
        await asyncio.shield(self._reaper)

    async def _connect(self, ours: socket.socket, config: BackendConfig) -> None:
        ours.setblocking(False)
        loop = asyncio.get_running_loop()
        transport, _ = await loop.create_unix_connection(lambda: _EngineProtocol(self), sock=ours)
        self._transport = transport
        self._transport.write(encode_frame(Configure(msgspec.structs.replace(config, pool_token=""))))

    async def _reap(self) -> None:
        exit_code = await self._process.wait()
        if self._killer is not None:
            self._killer.cancel()
        if not self._ready.done():
            # What the engine said last may still be in the socket; the end of the stream comes after it.
            await asyncio.sleep(0.1)
        self._lose_connection(f"the engine process ended with exit code {exit_code}")
        if not self._ready.done():
            self._fail_start(_describe_early_end(exit_code))
        if not self.died.done():
            self.died.set_result(EngineDeath(exit_code, self._failure))

    def _kill(self) -> None:
        if self._process.returncode is None:
            self._process.kill()

    def _receive(self, message: FromEngine) -> None:
        if isinstance(message, StepOutputs):
            self._stats = message.stats
            for output in message.outputs:
                self._deliver(output)
        elif isinstance(message, TransferReport):
            self._on_transfers(message)
        elif isinstance(message, StartProgress):
            self._on_progress(message)
        elif isinstance(message, EngineInfo):
            self._ready.set_result(message)
        elif not self._ready.done():
            self._fail_start(message.message)

    def _fail_start(self, why: str) -> None:
        self._ready.set_exception(EngineStartError(why))
        self._ready.exception()  # marks it as seen: whoever started the engine may have given up waiting

    def _deliver(self, output: TokenOutput) -> None:
        stream = self._streams.get(output.sequence_id)
        if stream is None:
            return
        if output.finish_reason is not None:
            del self._streams[output.sequence_id]
        stream._push(output)

    def _lose_connection(self, why: str) -> None:
        transport, self._transport = self._transport, None
        if transport is None:
            return
        self._failure = why
        transport.close()
        self._killer = asyncio.get_running_loop().call_later(STOP_GRACE_S, self._kill)
        streams, self._streams = self._streams, {}
        for stream in streams.values():
            stream._fail(EngineDiedError(why))


async def _spawn(worker_module: str) -> tuple[socket.socket, asyncio.subprocess.Process]:
    """Start an engine process; returns our end of the socket to it."""
    ours, theirs = socket.socketpair()
    with theirs:
        try:
            process = await asyncio.create_subprocess_exec(
                sys.executable, "-m", worker_module, str(theirs.fileno()),
                stdin=asyncio.subprocess.DEVNULL, pass_fds=(theirs.fileno(),),
                env={**ENGINE_ENVIRONMENT, **os.environ},
            )  # fmt: skip
        except BaseException:
            ours.close()
            raise
    return ours, process


def _describe_early_end(exit_code: int) -> str:
    if exit_code == -9:
        return "the engine process was killed while it started; the machine may be out of memory"
    return f"the engine process ended with exit code {exit_code} before it was ready; its log says why"


class _EngineProtocol(asyncio.Protocol):
    """Feeds what the engine writes to the client."""

    def __init__(self, client: EngineClient) -> None:
        self._client = client
        self._frames = FrameBuffer()
        self._decoder = msgspec.msgpack.Decoder(FromEngine)

    def data_received(self, data: bytes) -> None:
        try:
            for payload in self._frames.feed(data):
                self._client._receive(self._decoder.decode(payload))
        except (FrameError, msgspec.DecodeError) as error:
            self._client._lose_connection(f"the engine sent something unreadable: {error}")

    def connection_lost(self, error: Exception | None) -> None:
        self._client._lose_connection("the engine process has ended")
