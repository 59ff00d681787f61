"""Blocks on their way out of an engine and into it, a few between any two steps.

Domain: an *export* puts out the full blocks of one sequence's prompt, in order, as they are in the cache,
whoever computed them. An *import* takes in blocks of a prompt, in order, and keeps them until the sequence
that they are for is admitted. Records pass through the slots of an exchange
(:mod:`backend.transfer.exchange`); what the other side put into a slot has been checked there.

Invariants: every block is kept by a hold that ends with its export's copy, its import's admission or the
deadline of its lease, whichever comes first; a slot is free, or belongs to one export until its deadline.

Time: at most ``max_blocks_per_step`` copies a call of :meth:`Transfers.advance`.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field

import torch

from backend.config import TransferConfig
from backend.engine.block_pool import OutOfBlocksError
from backend.engine.block_store import BlockStore, Hold, StaleBlockError
from backend.engine.messages import (
    BeginImport,
    EndImport,
    ExportedBlock,
    FreeSlots,
    ImportStep,
    PutBlocks,
    SequenceRequest,
    ToExchange,
    TransferReport,
)
from backend.engine.sequence import Sequence, SequenceStatus
from backend.transfer.exchange import Exchange
from backend.transfer.payload import HEADER_BYTES, write_record


@dataclass(slots=True)
class _Export:
    sequence: Sequence
    next_index: int
    num_blocks: int
    deadline_s: float
    queue: deque[tuple[int, Hold]] = field(default_factory=deque)
    slots: set[int] = field(default_factory=set)
    has_failed: bool = False

    @property
    def is_idle(self) -> bool:
        """Nothing more comes of it; its slots may still be read."""
        return self.has_failed or (self.next_index >= self.num_blocks and not self.queue)


@dataclass(slots=True)
class _Import:
    digests: list[bytes]
    deadline_s: float
    holds: list[Hold] = field(default_factory=list)
    queue: deque[int] = field(default_factory=deque)
    sequence: Sequence | None = None


class Transfers:
    """See the module. All methods belong between steps."""

    def __init__(
        self, store: BlockStore, exchange: Exchange, config: TransferConfig, clock_s: Callable[[], float]
    ) -> None:
        self._store = store
        self._exchange = exchange
        self._config = config
        self._clock_s = clock_s
        self._free = list(range(exchange.info.num_outgoing))
        self._exports: dict[int, _Export] = {}
        self._imports: dict[int, _Import] = {}
        self._exported: list[ExportedBlock] = []
        self._import_steps: list[ImportStep] = []
        self._ended: list[int] = []
        self.num_blocks_exported = 0
        self.num_blocks_imported = 0

    @property
    def has_work(self) -> bool:
        """Whether :meth:`advance` would copy or report something now."""
        if self._import_steps or self._exported or self._ended:
            return True
        return any(each.queue for each in self._imports.values()) or (
            bool(self._free) and any(each.queue for each in self._exports.values())
        )

    @property
    def next_deadline_s(self) -> float | None:
        """When something expires; None when nothing is kept."""
        exports = [export.deadline_s for export in self._exports.values()]
        return min((*exports, *(entry.deadline_s for entry in self._imports.values())), default=None)

    # -- out -----------------------------------------------------------------------------------------------

    def expect(self, request: SequenceRequest, sequence: Sequence) -> None:
        """A sequence was queued: put out its blocks, or keep those that were brought for it, as it asks."""
        if request.exports_from is not None:
            num_blocks = self._store.hash_blocks(sequence)
            self._exports[sequence.sequence_id] = _Export(
                sequence, request.exports_from, num_blocks, self._deadline_s()
            )
        if (entry := self._imports.get(request.lease_id)) is not None:
            entry.sequence = sequence

    def free(self, message: FreeSlots) -> None:
        """What was put out in these slots was taken; their exports live on."""
        freed = set(message.slots)
        for export in self._exports.values():
            if taken := export.slots & freed:
                export.slots -= taken
                export.deadline_s = self._deadline_s()
                self._free += taken

    def end_export(self, sequence_id: int) -> None:
        """Nobody takes what is left. Idempotent."""
        export = self._exports.pop(sequence_id, None)
        if export is not None:
            self._drop(export)

    # -- in ------------------------------------------------------------------------------------------------

    def begin(self, message: BeginImport) -> None:
        """Keep what is here of a prompt, and make ready for the rest."""
        if message.lease_id in self._imports:
            return
        entry = self._imports[message.lease_id] = _Import(message.digests, self._deadline_s())
        for digest in message.digests:
            hold = self._store.hold(digest)
            if hold is None:
                break
            entry.holds.append(hold)
        self._import_steps.append(ImportStep(message.lease_id, len(entry.holds)))

    def put(self, message: PutBlocks) -> None:
        """Records wait in these slots; of an import that is over they are not looked at."""
        entry = self._imports.get(message.lease_id)
        if entry is None:
            self._import_steps.append(ImportStep(message.lease_id, 0, message.slots, "the lease is over"))
            return
        entry.deadline_s = self._deadline_s()
        entry.queue.extend(message.slots)

    def end_import(self, lease_id: int) -> None:
        """Keep nothing more. Idempotent."""
        entry = self._imports.pop(lease_id, None)
        if entry is not None:
            self._store.release(entry.holds)
            self._import_steps.append(ImportStep(lease_id, len(entry.holds), list(entry.queue), "ended"))

    # -- between steps -------------------------------------------------------------------------------------

    def advance(self) -> TransferReport | None:
        """Copy some blocks and let go of what is over; what there is to tell."""
        self._expire(self._clock_s())
        budget = self._config.max_blocks_per_step
        for lease_id in list(self._imports):
            budget -= self._take_in(lease_id, budget)
        for export in list(self._exports.values()):
            self._look(export)
            budget -= self._put_out(export, budget)
        report = TransferReport(self._exported, self._import_steps, self._ended)
        self._exported, self._import_steps, self._ended = [], [], []
        return report if report.exported or report.imports or report.ended_exports else None

    def close(self) -> None:
        """Let go of everything."""
        for sequence_id in list(self._exports):
            self.end_export(sequence_id)
        for lease_id in list(self._imports):
            self.end_import(lease_id)

    def _expire(self, now_s: float) -> None:
        for sequence_id, export in list(self._exports.items()):
            if export.deadline_s <= now_s and (export.queue or export.slots or export.is_idle):
                self._ended.append(sequence_id)
                self.end_export(sequence_id)
        for lease_id, entry in list(self._imports.items()):
            sequence = entry.sequence
            if sequence is not None and sequence.status is not SequenceStatus.WAITING:
                self.end_import(lease_id)
            elif entry.deadline_s <= now_s:
                self._fail_import(lease_id, "nothing came for the length of the lease")

    def _look(self, export: _Export) -> None:
        """Hold the blocks that have come into the cache since the last look."""
        sequence = export.sequence
        while export.next_index < export.num_blocks:
            hold = self._store.hold(sequence.block_hashes[export.next_index])
            if hold is None:
                break
            export.queue.append((export.next_index, hold))
            export.next_index += 1
            export.deadline_s = self._deadline_s()
        is_over = sequence.status is SequenceStatus.FINISHED
        if export.next_index < export.num_blocks and is_over and not export.has_failed:
            export.has_failed = True
            self._ended.append(sequence.sequence_id)

    def _put_out(self, export: _Export, budget: int) -> int:
        """Copy held blocks into free slots; how many."""
        count = min(len(export.queue), len(self._free), max(budget, 0))
        if not count:
            return 0
        batch = [export.queue.popleft() for _ in range(count)]
        holds = [hold for _, hold in batch]
        try:
            rows = self._store.export(holds)
        except StaleBlockError:
            self._fail_export(export)
            return 0
        finally:
            self._store.release(holds)
        layout = self._store.layout
        for (index, hold), row in zip(batch, rows, strict=True):
            slot = self._free.pop()
            export.slots.add(slot)
            content = memoryview(row.numpy())
            size = write_record(self._exchange.slot(slot), layout, hold.digest, content)
            cached = export.sequence.cached_prompt_tokens
            self._exported.append(ExportedBlock(export.sequence.sequence_id, index, slot, size, cached))
        self.num_blocks_exported += count
        return count

    def _take_in(self, lease_id: int, budget: int) -> int:
        """Copy records from their slots into fresh blocks; how many."""
        entry = self._imports[lease_id]
        count = min(len(entry.queue), max(budget, 0))
        if not count:
            return 0
        slots = [entry.queue.popleft() for _ in range(count)]
        first = len(entry.holds)
        digests = entry.digests[first : first + count]
        num_kept = sum(len(each.holds) for each in self._imports.values())
        room = int(self._store.num_blocks * self._config.max_share) - num_kept
        if len(digests) < count or count > room:
            entry.queue.extendleft(reversed(slots))
            self._fail_import(lease_id, "there is no room for the blocks")
            return 0
        size = self._store.layout.block_bytes
        rows = torch.stack(
            [
                torch.frombuffer(
                    self._exchange.slot(slot), dtype=torch.uint8, count=size, offset=HEADER_BYTES
                )
                for slot in slots
            ]
        )
        try:
            entry.holds += self._store.put_in(digests, rows)
        except OutOfBlocksError:
            entry.queue.extendleft(reversed(slots))
            self._fail_import(lease_id, "there is no room for the blocks")
            return 0
        self.num_blocks_imported += count
        self._import_steps.append(ImportStep(lease_id, len(entry.holds), slots))
        return count

    def _fail_import(self, lease_id: int, why: str) -> None:
        entry = self._imports.pop(lease_id)
        self._store.release(entry.holds)
        self._import_steps.append(ImportStep(lease_id, len(entry.holds), list(entry.queue), why))

    def _fail_export(self, export: _Export) -> None:
        export.has_failed = True
        self._store.release([hold for _, hold in export.queue])
        export.queue.clear()
        self._ended.append(export.sequence.sequence_id)

    def _drop(self, export: _Export) -> None:
        self._store.release([hold for _, hold in export.queue])
        self._free += export.slots

    def _deadline_s(self) -> float:
        return self._clock_s() + self._config.lease_s


def take_message(transfers: Transfers, message: ToExchange) -> None:
    """Do what the HTTP process says about blocks on their way."""
    if isinstance(message, BeginImport):
        transfers.begin(message)
    elif isinstance(message, PutBlocks):
        transfers.put(message)
    elif isinstance(message, EndImport):
        transfers.end_import(message.lease_id)
    elif isinstance(message, FreeSlots):
        transfers.free(message)
    else:
        transfers.end_export(message.sequence_id)
