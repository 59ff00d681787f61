"""The HTTP process's side of the exchange: whose block is in which slot, and who waits for what.

State: the incoming slots that are free; the imports and exports that somebody here runs, by id. Invariant: an
incoming slot is free, with the import that fills it, or with the engine until it reports it back.
"""

from __future__ import annotations

import asyncio
import itertools
from collections.abc import Callable
from typing import Protocol

from backend.engine.messages import (
    BeginImport,
    EndExport,
    EndImport,
    ExportedBlock,
    FreeSlots,
    PutBlocks,
    ToExchange,
    TransferReport,
)
from backend.transfer.exchange import Exchange


class TransferFailedError(Exception):
    """A transfer came to nothing, or to half of something; the message says why."""


class ExchangePort(Protocol):
    """What the desk needs of an engine (:class:`backend.engine.client.EngineClient`)."""

    def tell(self, message: ToExchange) -> None: ...
    def on_transfers(self, callback: Callable[[TransferReport], None]) -> None: ...


class Import:
    """Blocks on their way in; end it with :meth:`close`, whatever happens.

    ``num_blocks`` of the prompt are here and kept for the sequence that is submitted with ``lease_id``.
    """

    def __init__(self, desk: Desk, lease_id: int, num_wanted: int) -> None:
        self.lease_id = lease_id
        self.num_blocks = 0
        self._desk = desk
        self._num_wanted = num_wanted
        self._failure = ""
        self._has_begun = False
        self._changed = asyncio.Event()
        self._slots: set[int] = set()

    async def begun(self) -> int:
        """Wait until the engine has looked at what is here; how many blocks that is.

        Raises:
            TransferFailedError: it cannot be.
        """
        await self._until(lambda: self._has_begun)
        return self.num_blocks

    async def take_slot(self) -> int:
        """A free slot to fill; waits for one."""
        slot = await self._desk.take_slot()
        self._slots.add(slot)
        return slot

    def put(self, slot: int) -> None:
        """The next block's record is in this slot, checked."""
        self._slots.discard(slot)
        self._desk.tell(PutBlocks(self.lease_id, [slot]))

    async def arrived(self) -> None:
        """Wait until every block is in the cache.

        Raises:
            TransferFailedError: the engine gave up on it.
        """
        await self._until(lambda: self.num_blocks >= self._num_wanted)

    def check(self) -> None:
        """Raises TransferFailedError when the engine gave up on it."""
        if self._failure:
            raise TransferFailedError(self._failure)

    def close(self) -> None:
        """Keep nothing any more. Idempotent."""
        self._desk.end_import(self)
        self._desk.give_back(self._slots)
        self._slots = set()

    def advance(self, num_blocks: int, failure: str) -> None:
        """The engine says how far it is."""
        self._has_begun = True
        self.num_blocks = max(self.num_blocks, num_blocks)
        self._failure = self._failure or failure
        self._changed.set()

    async def _until(self, is_reached: Callable[[], bool]) -> None:
        while not is_reached():
            self.check()
            self._changed.clear()
            await self._changed.wait()


class Export:
    """Blocks on their way out; end it with :meth:`close`, whatever happens."""

    def __init__(self, desk: Desk, sequence_id: int) -> None:
        self.sequence_id = sequence_id
        self._desk = desk
        self._blocks: asyncio.Queue[ExportedBlock | TransferFailedError] = asyncio.Queue()

    async def next(self) -> ExportedBlock:
        """The next block's record; its slot is to be given back with :meth:`free`.

        Raises:
            TransferFailedError: no more will come.
        """
        block = await self._blocks.get()
        if isinstance(block, TransferFailedError):
            raise block
        return block

    def free(self, slots: list[int]) -> None:
        """What was in these slots was taken."""
        self._desk.tell(FreeSlots(slots))

    def put(self, block: ExportedBlock | TransferFailedError) -> None:
        """The engine, or who reads the sequence, says what comes next."""
        self._blocks.put_nowait(block)

    def close(self) -> None:
        """Let go of what is not sent. Idempotent."""
        self._desk.end_export(self)


class Desk:
    """See the module. Belongs to one event loop.

    Args:
        engine: whose blocks.
        exchange: its memory, opened here.
    """

    def __init__(self, engine: ExchangePort, exchange: Exchange) -> None:
        info = exchange.info
        self.exchange = exchange
        self._engine = engine
        self._free = list(range(info.num_outgoing, info.num_slots))
        self._waiting: list[asyncio.Future[None]] = []
        self._imports: dict[int, Import] = {}
        self._exports: dict[int, Export] = {}
        self._lease_ids = itertools.count(1)
        engine.on_transfers(self._take_report)

    @property
    def num_free_slots(self) -> int:
        """Incoming slots that nobody fills."""
        return len(self._free)

    def begin_import(self, digests: list[bytes]) -> Import:
        """Make ready for the blocks of a prompt."""
        entry = Import(self, next(self._lease_ids), len(digests))
        self._imports[entry.lease_id] = entry
        self.tell(BeginImport(entry.lease_id, digests))
        return entry

    def begin_export(self, sequence_id: int) -> Export:
        """Hear of the blocks of a sequence that is about to be submitted."""
        export = self._exports[sequence_id] = Export(self, sequence_id)
        return export

    def tell(self, message: ToExchange) -> None:
        self._engine.tell(message)

    async def take_slot(self) -> int:
        """An incoming slot; waits for one to be free."""
        while not self._free:
            turn: asyncio.Future[None] = asyncio.get_running_loop().create_future()
            self._waiting.append(turn)
            try:
                await turn
            finally:
                if turn in self._waiting:
                    self._waiting.remove(turn)
        return self._free.pop()

    def give_back(self, slots: set[int] | list[int]) -> None:
        """Incoming slots that are not used any more."""
        self._free += slots
        waiting, self._waiting = self._waiting, []
        for turn in waiting:
            if not turn.done():
                turn.set_result(None)

    def end_import(self, entry: Import) -> None:
        if self._imports.pop(entry.lease_id, None) is not None:
            self.tell(EndImport(entry.lease_id))

    def end_export(self, export: Export) -> None:
        if self._exports.pop(export.sequence_id, None) is not None:
            self.tell(EndExport(export.sequence_id))

    def _take_report(self, report: TransferReport) -> None:
        for block in report.exported:
            export = self._exports.get(block.sequence_id)
            if export is not None:  # of one that was ended the engine has the slots back already
                export.put(block)
        for sequence_id in report.ended_exports:
            if (export := self._exports.get(sequence_id)) is not None:
                export.put(TransferFailedError("the blocks are not there any more"))
        for step in report.imports:
            if step.slots:
                self.give_back(step.slots)
            if (entry := self._imports.get(step.lease_id)) is not None:
                entry.advance(step.num_blocks, step.failure)
