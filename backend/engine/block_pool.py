"""Who owns each block of the KV cache.

Domain: a block is a fixed run of token slots. It is *free* (content worthless), *cached* (content known to
the prefix cache, nobody reads it) or *used* (one or more sequences hold it).

A block gets a new *tag* each time it is taken, by which its content can be told from what was there before.

Invariants: free + cached + used = all; the reference count of a block is the number of block tables it is in;
a block in more than one table is full and is never written again.

Time: O(blocks taken or released).
"""

from __future__ import annotations

from collections.abc import Iterable
from collections.abc import Sequence as ListOf

from backend.engine.prefix_cache import PrefixCache
from backend.engine.sequence import expect


class OutOfBlocksError(Exception):
    """More blocks were asked for than are free or cached."""


class BlockPool:
    """Hands out block ids ``0 .. num_blocks-1`` and counts their holders."""

    def __init__(self, num_blocks: int, cache: PrefixCache | None = None) -> None:
        if num_blocks < 1:
            raise ValueError(f"num_blocks: must be at least 1, not {num_blocks}")
        self.num_blocks = num_blocks
        self._cache = cache
        self._free = list(range(num_blocks - 1, -1, -1))
        self._num_holders = [0] * num_blocks
        self._tags = [0] * num_blocks
        self._last_tag = 0

    @property
    def num_free(self) -> int:
        return len(self._free)

    @property
    def num_cached(self) -> int:
        return 0 if self._cache is None else self._cache.num_unused

    @property
    def num_used(self) -> int:
        return self.num_blocks - self.num_free - self.num_cached

    @property
    def num_available(self) -> int:
        """Blocks that can be taken: the free ones and, after eviction, the cached ones."""
        return self.num_free + self.num_cached

    def num_cached_among(self, blocks: Iterable[int]) -> int:
        """How many of these indexed blocks nobody holds: sharing them makes fewer available."""
        holders = self._num_holders
        return [holders[block] for block in blocks].count(0)

    def take(self, count: int) -> list[int]:
        """Take ``count`` blocks of one's own, evicting the least recently used cached ones as needed.

        Raises:
            OutOfBlocksError: when fewer are available; nothing is taken then.
        """
        if count > self.num_available:
            raise OutOfBlocksError(f"{count} blocks wanted, {self.num_available} available")
        num_free = min(count, len(self._free))
        taken = [self._free.pop() for _ in range(num_free)]
        if count > num_free:
            assert self._cache is not None  # else num_available counts the free ones only
            taken += self._cache.evict(count - num_free)
        for block in taken:
            self._num_holders[block] = 1
            self._last_tag += 1
            self._tags[block] = self._last_tag
        return taken

    def tags_of(self, blocks: Iterable[int]) -> list[int]:
        """What names the content that each block was last taken for; no two takings share one."""
        return [self._tags[block] for block in blocks]

    def still_held(self, blocks: Iterable[int], tags: Iterable[int]) -> list[int]:
        """Those of a holder's blocks that were not taken again since it got them under ``tags``."""
        return [block for block, tag in zip(blocks, tags, strict=True) if self._tags[block] == tag]

    def share(self, blocks: Iterable[int]) -> None:
        """Hold blocks that the prefix cache found."""
        holders = self._num_holders
        idle: list[int] = []
        for block in blocks:
            if holders[block] == 0:
                idle.append(block)
            holders[block] += 1
        if idle:
            assert self._cache is not None  # only the prefix cache finds blocks that nobody holds
            self._cache.reuse(idle)

    def release(self, blocks: ListOf[int]) -> None:
        """Give up one hold on each block of a table.

        The tail goes first, so that it is evicted first: a prefix is of use without what follows it, and what
        follows is of none without the prefix.
        """
        holders = self._num_holders
        idle: list[int] = []
        for block in reversed(blocks):
            num_left = holders[block] - 1
            if num_left == 0:
                idle.append(block)
            else:
                expect(num_left > 0, "a block was released more often than held")
            holders[block] = num_left
        self._free += idle if self._cache is None else self._cache.keep(idle)

    def check_invariants(self, tables: Iterable[ListOf[int]]) -> None:
        """Raise InvariantError when the counts do not agree with the block tables that exist. O(blocks)."""
        counted = [0] * self.num_blocks
        for table in tables:
            expect(len(set(table)) == len(table), "a block table holds a block twice")
            for block in table:
                counted[block] += 1
        expect(counted == self._num_holders, "reference counts differ from the block tables")
        cached = [] if self._cache is None else self._cache.unused_blocks()
        idle = self._free + cached
        expect(len(set(idle)) == len(idle), "a block is free or cached twice")
        expect(all(counted[block] == 0 for block in idle), "a block in use is free or cached too")
        expect(len(idle) + sum(1 for count in counted if count) == self.num_blocks, "a block was lost")
