"""Brings a prompt's KV blocks from the replica that computes it, and whatever happens lets go of it all.

A transfer that fails anywhere leaves what has arrived: the rest of the prompt is computed here, and the
request goes on. Every wait has its bound.
"""

from __future__ import annotations

import asyncio
import logging

import msgspec

from backend.config import TransferConfig
from backend.transfer.counters import Failure, TransferCounters
from backend.transfer.desk import Desk, Import, TransferFailedError
from backend.transfer.link import Link, LinkError, greet_as_client
from backend.transfer.nixl import is_installed
from backend.transfer.payload import BadRecordError, read_record
from backend.transfer.prompts import Prompt
from backend.transfer.protocol import Accepted, Ask, Block, Done, FromPrefill, LinkKind, Refused, Taken
from backend.transfer.records import RecordReader, choose_reader, joined_of

_log = logging.getLogger("backend.transfer")


class RefusedByPrefillError(Exception):
    """The other replica does not compute the prompt, or not to its end."""


class Fetch:
    """One prompt on its way in. Run it once; :meth:`close` it when its sequence is over or submitted.

    Attributes:
        lease_id: names the kept blocks to the engine.
        cached_tokens: what the other replica found cached at first admission, None until it says so.
        told_cached_tokens: what counts as cached for the customer; None when this engine decides as usual.
    """

    def __init__(self, fetcher: Fetcher, prompt: Prompt) -> None:
        self._fetcher = fetcher
        self._prompt = prompt.head_for(fetcher.block_size)
        self._digests = self._prompt.digests(fetcher.block_size)
        self._entry: Import = fetcher.desk.begin_import(self._digests)
        self._num_present = 0
        self._num_put = 0
        self.cached_tokens: int | None = None

    @property
    def lease_id(self) -> int:
        return self._entry.lease_id

    @property
    def told_cached_tokens(self) -> int | None:
        """Blocks that were brought were computed for this request: they are no cached ones."""
        if self.cached_tokens is not None or not self._num_put:
            return self.cached_tokens
        return self._num_present * self._fetcher.block_size

    async def run(self, host: str, port: int) -> None:
        """Bring what can be brought from there. Raises nothing but CancelledError."""
        counters = self._fetcher.counters
        counters.num_started_in += 1
        failure: Failure | None = None
        reason: Exception | None = None
        try:
            async with asyncio.timeout(self._fetcher.config.transfer_timeout_s):
                await self._run(host, port)
        except BadRecordError as error:
            failure, reason = "corrupt", error
        except RefusedByPrefillError as error:
            failure, reason = "refused", error
        except TransferFailedError as error:
            failure, reason = "no_room", error
        except TimeoutError as error:
            failure, reason = "stalled", error
        except LinkError as error:
            failure, reason = "lost", error
        except OSError as error:
            failure, reason = "unreachable", error
        if failure is None:
            counters.num_completed_in += 1
            return
        counters.count_failure(failure)
        _log.warning("prompt computed here: transfer %s", failure, extra={"fields": {"reason": str(reason)}})

    def close(self) -> None:
        """Keep nothing any more. Idempotent."""
        self._entry.close()

    async def _run(self, host: str, port: int) -> None:
        config = self._fetcher.config
        async with asyncio.timeout(config.stall_timeout_s):
            self._num_present = await self._entry.begun()
        if self._num_present >= len(self._digests):
            return
        async with asyncio.timeout(config.connect_timeout_s):
            link = await self._fetcher.connect(host, port)
        reader: RecordReader | None = None
        try:
            reader = await self._ask(link)
            await self._take_blocks(link, reader)
        finally:
            link.close()
            if reader is not None:
                reader.close()
        async with asyncio.timeout(config.stall_timeout_s):
            await self._entry.arrived()

    async def _ask(self, link: Link[FromPrefill]) -> RecordReader:
        fetcher, prompt = self._fetcher, self._prompt
        layout = fetcher.desk.exchange.info.layout
        links = offered_links(fetcher.config)
        await link.send(
            Ask(prompt.token_ids, prompt.cache_salt, prompt.media, self._num_present, layout.digest, links)
        )
        answer, _ = await self._hear(link)
        if not isinstance(answer, Accepted):
            raise RefusedByPrefillError(answer.reason if isinstance(answer, Refused) else "no answer")
        reader = choose_reader(answer, links, fetcher.desk.exchange)
        await link.send(joined_of(reader))
        return reader

    async def _take_blocks(self, link: Link[FromPrefill], reader: RecordReader) -> None:
        index = self._num_present
        while True:
            message, content = await self._hear(link)
            self._entry.check()
            if isinstance(message, Done):
                self.cached_tokens = message.cached_tokens
                if index < len(self._digests):
                    raise LinkError("the other replica ended too soon")
                return
            if not isinstance(message, Block) or message.index != index or index >= len(self._digests):
                raise RefusedByPrefillError(
                    message.reason if isinstance(message, Refused) else "blocks came out of order"
                )
            if message.cached_tokens is not None:
                self.cached_tokens = message.cached_tokens
            await self._take(message, content, link, reader)
            index += 1

    async def _take(
        self, block: Block, content: bytes, link: Link[FromPrefill], reader: RecordReader
    ) -> None:
        desk, counters = self._fetcher.desk, self._fetcher.counters
        async with asyncio.timeout(self._fetcher.config.stall_timeout_s):
            slot = await self._entry.take_slot()
            with desk.exchange.slot(slot) as memory:
                size = await reader.read(block, content, memory)
                read_record(memory[:size], desk.exchange.info.layout, self._digests[block.index])
        self._entry.put(slot)
        self._num_put += 1
        counters.num_blocks_in += 1
        counters.num_bytes_in += size
        if block.slot is not None:
            await link.send(Taken([block.slot]))

    async def _hear(self, link: Link[FromPrefill]) -> tuple[FromPrefill, bytes]:
        async with asyncio.timeout(self._fetcher.config.stall_timeout_s):
            return await link.receive()


class Fetcher:
    """Makes the fetches of one replica.

    Args:
        secret: of the pool.
    """

    def __init__(self, desk: Desk, config: TransferConfig, secret: str, counters: TransferCounters) -> None:
        self.desk = desk
        self.config = config
        self.counters = counters
        self._secret = secret
        self._decoder = msgspec.msgpack.Decoder(FromPrefill)

    @property
    def block_size(self) -> int:
        """Tokens per block."""
        return self.desk.exchange.info.layout.block_size

    def fetch(self, prompt: Prompt) -> Fetch:
        """Begin to bring a prompt's blocks; :meth:`Fetch.run` does it."""
        return Fetch(self, prompt)

    async def connect(self, host: str, port: int) -> Link[FromPrefill]:
        """A link to another replica.

        Raises:
            OSError: nobody is there, or not one of this pool.
        """
        reader, writer = await asyncio.open_connection(host, port)
        try:
            key = await greet_as_client(reader, writer, self._secret)
        except BaseException:
            writer.close()
            raise
        return Link(
            reader, writer, key, self._decoder, is_server=False, max_frame_bytes=self.config.max_frame_bytes
        )


def offered_links(config: TransferConfig) -> list[LinkKind]:
    """The links that can be used here."""
    return [kind for kind in config.links if kind != "nixl" or is_installed()]
