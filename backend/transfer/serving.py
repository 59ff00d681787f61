"""Computes prompts for other replicas and sends their KV blocks as they are done.

One connection is one prompt. Whatever ends it (the last block, the other side gone, a wait that ran out, this
engine's end) also ends the sequence and everything that was kept for it.
"""

from __future__ import annotations

import asyncio
import logging
from typing import Protocol

import msgspec

from backend.config import TransferConfig
from backend.engine.client import EngineDiedError, SequenceRefusedError
from backend.engine.messages import ExportedBlock, SequenceRequest
from backend.http.engine_port import TokenStream
from backend.transfer.counters import TransferCounters
from backend.transfer.desk import Desk, Export, TransferFailedError
from backend.transfer.fetching import offered_links
from backend.transfer.link import Link, LinkError, greet_as_server
from backend.transfer.nixl import NixlAgent
from backend.transfer.prompts import Prompt
from backend.transfer.protocol import Accepted, Ask, Block, Done, FromAsker, Joined, LinkKind, Refused, Taken

_log = logging.getLogger("backend.transfer")


class PromptEngine(Protocol):
    """What computes prompts (:class:`backend.engine.client.EngineClient`)."""

    def new_sequence_id(self) -> int: ...
    def submit(self, request: SequenceRequest) -> TokenStream: ...


class PrefillServer:
    """Listens for other replicas. Belongs to one event loop.

    Args:
        secret: of the pool.
    """

    def __init__(
        self,
        engine: PromptEngine,
        desk: Desk,
        config: TransferConfig,
        secret: str,
        counters: TransferCounters,
    ) -> None:
        self._engine = engine
        self._desk = desk
        self._config = config
        self._secret = secret
        self._counters = counters
        self._decoder = msgspec.msgpack.Decoder(FromAsker)
        self._tasks: set[asyncio.Task[None]] = set()
        self._server: asyncio.Server | None = None
        self._agent: NixlAgent | None = None

    @property
    def num_open(self) -> int:
        """Connections at the moment."""
        return len(self._tasks)

    @property
    def port(self) -> int:
        """The port that it listens on."""
        assert self._server is not None
        return int(self._server.sockets[0].getsockname()[1])

    async def listen(self, host: str) -> None:
        """Open the port.

        Raises:
            OSError: when it is taken.
        """
        if "nixl" in offered_links(self._config):
            self._agent = NixlAgent(self._desk.exchange)
        self._server = await asyncio.start_server(self._accept, host, self._config.port or 0)

    async def wait_idle(self) -> None:
        """Until no prompt is being computed for others."""
        while self._tasks:
            await asyncio.wait(self._tasks)

    async def close(self) -> None:
        """Close the port and end what is in progress."""
        if self._server is not None:
            self._server.close()
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)
        if self._agent is not None:
            self._agent.close()

    async def _accept(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        task = asyncio.current_task()
        assert task is not None
        if len(self._tasks) >= self._config.max_transfers:
            writer.close()
            return
        self._tasks.add(task)
        try:
            async with asyncio.timeout(self._config.transfer_timeout_s):
                await self._serve(reader, writer)
        except (LinkError, TimeoutError, TransferFailedError, EngineDiedError) as error:
            self._counters.count_failure("stalled" if isinstance(error, TimeoutError) else "lost")
            _log.warning("transfer ended early", extra={"fields": {"reason": str(error) or "stalled"}})
        except asyncio.CancelledError:
            pass  # close() ends it; the stream's own callback must not see that as a failure
        finally:
            self._tasks.discard(task)
            writer.close()

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        config = self._config
        async with asyncio.timeout(config.connect_timeout_s):
            key = await greet_as_server(reader, writer, self._secret)
        link = Link(
            reader, writer, key, self._decoder, is_server=True, max_frame_bytes=config.max_frame_bytes
        )
        async with asyncio.timeout(config.stall_timeout_s):
            ask, _ = await link.receive()
        if not isinstance(ask, Ask):
            raise LinkError("the first message is no question")
        layout = self._desk.exchange.info.layout
        if ask.layout != layout.digest:
            await link.send(Refused("this replica has another model, type or shape of KV cache"))
            return
        self._counters.num_started_out += 1
        prompt = Prompt(ask.prompt_token_ids, ask.cache_salt, ask.media)
        sequence_id = self._engine.new_sequence_id()
        export = self._desk.begin_export(sequence_id)
        stream: TokenStream | None = None
        try:
            stream = self._engine.submit(prompt.as_request(sequence_id, ask.first_block))
            await self._send_blocks(_Sending(link, export, stream, ask, layout.block_size))
        except SequenceRefusedError as error:
            await link.send(Refused(error.code))
        finally:
            export.close()
            if stream is not None:
                stream.abort()

    async def _send_blocks(self, sending: _Sending) -> None:
        kind = await self._agree(sending)
        watchers = [
            asyncio.create_task(_watch_sequence(sending.stream, sending.export)),
            asyncio.create_task(_hear_taken(sending.link, sending.export)),
        ]
        try:
            for index in range(sending.ask.first_block, sending.num_blocks):
                async with asyncio.timeout(self._config.stall_timeout_s):
                    block = await sending.export.next()
                    if block.index != index:
                        raise TransferFailedError("blocks came out of order")
                    await self._send(block, kind, sending)
            async with asyncio.timeout(self._config.stall_timeout_s):
                cached_tokens = await watchers[0]
                await sending.link.send(Done(cached_tokens or 0))
                self._counters.num_completed_out += 1
                await watchers[1]  # the other side closes when it has everything
        finally:
            for watcher in watchers:
                watcher.cancel()
            await asyncio.gather(*watchers, return_exceptions=True)

    async def _agree(self, sending: _Sending) -> LinkKind:
        offered = [kind for kind in offered_links(self._config) if kind in sending.ask.links]
        exchange = self._desk.exchange.info if "memory" in offered else None
        agent = self._agent.place if self._agent is not None and "nixl" in offered else b""
        await sending.link.send(Accepted(offered, exchange, agent))
        async with asyncio.timeout(self._config.stall_timeout_s):
            joined, _ = await sending.link.receive()
        if not isinstance(joined, Joined):
            raise LinkError("the other replica does not say how")
        return joined.link

    async def _send(self, block: ExportedBlock, kind: LinkKind, sending: _Sending) -> None:
        self._counters.num_blocks_out += 1
        self._counters.num_bytes_out += block.num_bytes
        message = Block(block.index, block.num_bytes, None, block.cached_tokens)
        if kind != "tcp":
            await sending.link.send(msgspec.structs.replace(message, slot=block.slot))
            return
        with self._desk.exchange.slot(block.slot) as slot:
            # Copied: the transport may keep a reference longer than the slot is ours.
            content = bytes(slot[: block.num_bytes])
        sending.export.free([block.slot])
        await sending.link.send(message, content)


class _Sending:
    """One prompt that is being sent."""

    def __init__(
        self, link: Link[FromAsker], export: Export, stream: TokenStream, ask: Ask, block_size: int
    ) -> None:
        self.link = link
        self.export = export
        self.stream = stream
        self.ask = ask
        self.num_blocks = len(ask.prompt_token_ids) // block_size


async def _watch_sequence(stream: TokenStream, export: Export) -> int:
    """Read the sequence to its end; the cached tokens of its first admission."""
    try:
        while True:
            output = await stream.__anext__()
            if output.finish_reason not in (None, "length"):
                raise TransferFailedError(output.message or "the prompt was not computed")
    except StopAsyncIteration:
        return stream.cached_prompt_tokens
    except SequenceRefusedError as error:
        export.put(TransferFailedError(error.code))
        raise
    except (EngineDiedError, TransferFailedError) as error:
        export.put(TransferFailedError(str(error)))
        raise


async def _hear_taken(link: Link[FromAsker], export: Export) -> None:
    """Give slots back as they are taken, until the other side closes; then nothing more need be sent."""
    try:
        while True:
            message, _ = await link.receive()
            if isinstance(message, Taken):
                export.free(message.slots)
    except LinkError as error:
        export.put(TransferFailedError(str(error)))
