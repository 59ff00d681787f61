"""Records by way of NIXL (RDMA, NVLink and others), where its Python binding is installed.

The side that has the records registers its exchange with an agent and hands on the agent's metadata; the side
that wants them reads from there into its own exchange, which it has registered too. Frames on the link still
say which record is where, and checksums are compared as with every other link.
"""

from __future__ import annotations

import asyncio
import ctypes
import importlib
import importlib.util
import secrets
from typing import Any

import msgspec

from backend.transfer.exchange import Exchange, ExchangeError
from backend.transfer.protocol import Block, LinkKind

_MODULE = "nixl._api"
_POLL_S = 0.0002
_MEMORY = "DRAM"


class AgentPlace(msgspec.Struct, frozen=True, array_like=True):
    """An agent's metadata, and where the slots of its exchange begin."""

    metadata: bytes
    base: int
    slot_bytes: int


def is_installed() -> bool:
    """Whether the binding can be imported."""
    return importlib.util.find_spec("nixl") is not None


class NixlAgent:
    """An agent of this process with an exchange's slots registered.

    Raises:
        ImportError: NIXL is not installed.
    """

    def __init__(self, exchange: Exchange) -> None:
        api: Any = importlib.import_module(_MODULE)
        self.name = secrets.token_hex(8)
        self.agent: Any = api.nixl_agent(self.name)
        with exchange.slot(0) as first:
            self.base = ctypes.addressof(ctypes.c_char.from_buffer(first))
        self.slot_bytes = exchange.info.slot_bytes
        total = exchange.info.num_slots * self.slot_bytes
        self._registered = self.agent.register_memory([(self.base, total, 0, "")], _MEMORY)

    @property
    def place(self) -> bytes:
        """What the other side needs to read from here."""
        place = AgentPlace(self.agent.get_agent_metadata(), self.base, self.slot_bytes)
        return msgspec.msgpack.encode(place)

    def close(self) -> None:
        """Let go of the memory."""
        self.agent.deregister_memory(self._registered)


class NixlReader:
    """A :class:`backend.transfer.records.RecordReader` that reads from another agent's memory."""

    kind: LinkKind = "nixl"

    def __init__(self, place: bytes, own: Exchange) -> None:
        self._place = msgspec.msgpack.decode(place, type=AgentPlace)
        self._own = NixlAgent(own)
        self._remote: str = self._own.agent.add_remote_agent(self._place.metadata)

    async def read(self, block: Block, content: bytes, into: memoryview) -> int:
        """See :class:`backend.transfer.records.RecordReader`.

        Raises:
            ExchangeError: the read failed.
        """
        if block.slot is None or block.num_bytes > min(len(into), self._place.slot_bytes):
            raise ExchangeError("the record lies in no slot")
        agent = self._own.agent
        local = ctypes.addressof(ctypes.c_char.from_buffer(into))
        remote = self._place.base + block.slot * self._place.slot_bytes
        handle = agent.initialize_xfer(
            "READ",
            agent.get_xfer_descs([(local, block.num_bytes, 0)], _MEMORY),
            agent.get_xfer_descs([(remote, block.num_bytes, 0)], _MEMORY),
            self._remote,
            b"",
        )
        try:
            state = agent.transfer(handle)
            while state == "PROC":
                await asyncio.sleep(_POLL_S)
                state = agent.check_xfer_state(handle)
        finally:
            agent.release_xfer_handle(handle)
        if state != "DONE":
            raise ExchangeError(f"NIXL could not read a record: {state}")
        return block.num_bytes

    def close(self) -> None:
        """Forget the other agent."""
        self._own.agent.remove_remote_agent(self._remote)
        self._own.close()
