"""What is in each physical block of the KV cache, checked before anything reads it.

Domain: the pool gives a block a new tag whenever it hands it out to be filled, and a sequence keeps the tags
of its blocks beside their ids. Here is the other side: the tag of whoever last wrote a block from its start.
As long as the engine's books are right the two agree. Where they differ, a block that was freed while held,
found under a wrong digest or named by mistake would answer one customer with another's content.

State: one integer per block. Time: O(blocks of the batch) a step.
"""

from __future__ import annotations

from collections.abc import Sequence as ListOf
from operator import itemgetter

from backend.engine.step import ScheduledChunk

_NEVER_WRITTEN = 0


class BlockTags:
    """The tags that were written last."""

    def __init__(self, num_blocks: int, block_size: int) -> None:
        self._written = [_NEVER_WRITTEN] * num_blocks
        self._block_size = block_size

    def find_mismatches(self, chunks: ListOf[ScheduledChunk]) -> list[int]:
        """Enter what a step is about to write; the indices of those chunks that must not be computed.

        Every write counts before anything is compared, so that of two chunks that write to one block in the
        same step at most one is left.
        """
        for chunk in chunks:
            self._enter(chunk)
        return [index for index, chunk in enumerate(chunks) if not self._holds(chunk)]

    def write(self, block: int, tag: int) -> None:
        """Enter that a whole block was filled from outside of a step."""
        self._written[block] = tag

    def holds(self, block: int, tag: int) -> bool:
        """Whether a block holds what was put there under ``tag``."""
        return self._written[block] == tag

    def mismatched_places(self, chunk: ScheduledChunk) -> list[int]:
        """The places in a chunk's block table, up to its end, whose blocks hold something else."""
        table, tags = chunk.block_table, chunk.block_tags
        return [place for place in range(self._count(chunk)) if self._written[table[place]] != tags[place]]

    def _enter(self, chunk: ScheduledChunk) -> None:
        size = self._block_size
        first = -(-chunk.start // size)
        for place in range(first, self._count(chunk)):
            self._written[chunk.block_table[place]] = chunk.block_tags[place]

    def _holds(self, chunk: ScheduledChunk) -> bool:
        """Whether every block up to the chunk's end holds what its sequence put there or was promised."""
        count = self._count(chunk)
        if count == 1:
            return self._written[chunk.block_table[0]] == chunk.block_tags[0]
        written: tuple[int, ...] = itemgetter(*chunk.block_table[:count])(self._written)
        return written == tuple(chunk.block_tags[:count])

    def _count(self, chunk: ScheduledChunk) -> int:
        """Blocks up to the chunk's end."""
        return -(-(chunk.start + len(chunk.token_ids)) // self._block_size)
