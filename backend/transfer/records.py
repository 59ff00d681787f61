"""How a record gets from another replica's exchange into a slot of ours."""

from __future__ import annotations

from typing import Protocol

from backend.transfer.exchange import Exchange, ExchangeError, open_exchange
from backend.transfer.nixl import NixlReader
from backend.transfer.protocol import Accepted, Block, Joined, LinkKind


class RecordReader(Protocol):
    """Fetches records one by one over one link."""

    kind: LinkKind

    async def read(self, block: Block, content: bytes, into: memoryview) -> int:
        """Put the record of ``block`` into ``into``; how many bytes it has. ``content`` came with the
        message.

        Raises:
            OSError: it cannot be had.
        """

    def close(self) -> None: ...


class TcpReader:
    """Records that came behind their messages."""

    kind: LinkKind = "tcp"

    async def read(self, block: Block, content: bytes, into: memoryview) -> int:
        """See :class:`RecordReader`."""
        if len(content) > len(into):
            raise ExchangeError(f"a record of {len(content)} bytes does not fit into a slot")
        into[: len(content)] = content
        return len(content)

    def close(self) -> None:
        """Nothing is held."""


class MemoryReader:
    """Records in the exchange of a replica on this machine."""

    kind: LinkKind = "memory"

    def __init__(self, exchange: Exchange) -> None:
        self._exchange = exchange

    async def read(self, block: Block, content: bytes, into: memoryview) -> int:
        """See :class:`RecordReader`."""
        if block.slot is None or block.num_bytes > len(into):
            raise ExchangeError("the record lies in no slot")
        with self._exchange.slot(block.slot) as slot:
            into[: block.num_bytes] = slot[: block.num_bytes]
        return block.num_bytes

    def close(self) -> None:
        """Unmap the other's memory."""
        self._exchange.close()


def choose_reader(accepted: Accepted, links: list[LinkKind], own: Exchange) -> RecordReader:
    """The first of ``links`` that both sides can do."""
    for kind in links:
        if kind not in accepted.links:
            continue
        if kind == "nixl" and accepted.agent:
            return NixlReader(accepted.agent, own)
        if kind == "memory" and accepted.exchange is not None:
            try:
                return MemoryReader(open_exchange(accepted.exchange))
            except ExchangeError:
                continue  # another machine, user or container
    return TcpReader()


def joined_of(reader: RecordReader) -> Joined:
    """What the other side is told about the choice."""
    return Joined(reader.kind)
