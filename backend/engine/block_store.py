"""Blocks into and out of an engine's KV cache besides its steps: for other replicas and other tiers.

Domain: a *hold* keeps one block where it is, as a place in a block table does, until it is released. What is
put in is found by the prefix cache like anything that was computed here; what is taken out is compared with
the tag it was filled under first.

State: the holds. Invariants: a hold counts once in the pool; a block that is put in is under its digest, or
another block with the same content was there before. Only between steps. Time: O(bytes copied).
"""

from __future__ import annotations

from collections.abc import Sequence as ListOf
from dataclasses import dataclass

import torch
from torch import Tensor

from backend.engine.block_pool import BlockPool, OutOfBlocksError
from backend.engine.block_tags import BlockTags
from backend.engine.kv_blocks import KvBlocks
from backend.engine.prefix_cache import PrefixCache
from backend.engine.sequence import Sequence, expect
from backend.transfer.payload import KvLayout


class StaleBlockError(Exception):
    """A block does not hold what it was held for: nothing was read."""


@dataclass(frozen=True, slots=True)
class Hold:
    """One hold on a full block; ``tag`` names the content that it was filled with."""

    number: int
    digest: bytes
    block: int
    tag: int


class BlockStore:
    """See the module. Shares pool, prefix cache and tags with the scheduler and the engine."""

    def __init__(self, pool: BlockPool, cache: PrefixCache, tags: BlockTags, kv: KvBlocks) -> None:
        self._pool = pool
        self._cache = cache
        self._tags = tags
        self._kv = kv
        self._holds: dict[int, Hold] = {}
        self._last_number = 0

    @property
    def layout(self) -> KvLayout:
        return self._kv.layout

    @property
    def cache(self) -> PrefixCache:
        """Where the blocks are found."""
        return self._cache

    @property
    def num_held(self) -> int:
        """Holds that were not released yet."""
        return len(self._holds)

    @property
    def num_blocks(self) -> int:
        return self._pool.num_blocks

    @property
    def num_available(self) -> int:
        """Blocks that could be put in now, the cached ones that would be evicted for it included."""
        return self._pool.num_available

    def hash_blocks(self, sequence: Sequence) -> int:
        """Hash the full blocks of a sequence's prompt, so that they can be held by name; how many."""
        num_blocks = sequence.num_prompt_tokens // self.layout.block_size
        if num_blocks:
            self._cache.digest(sequence, num_blocks - 1)
        return num_blocks

    def has(self, digest: bytes) -> bool:
        """Whether the prefix cache has this block now."""
        return self._cache.holds(digest)

    def hold(self, digest: bytes) -> Hold | None:
        """Hold the block with this content; None when there is none."""
        found = self._cache.find(digest)
        if found is None:
            return None
        block, tag = found
        self._pool.share([block])
        return self._enter(digest, block, tag)

    def export(self, holds: ListOf[Hold], first_layer: int = 0, num_layers: int = 0) -> Tensor:
        """The contents of held blocks, ``[holds, bytes]`` uint8 in host memory.

        Raises:
            StaleBlockError: when one holds something else.
        """
        for hold in holds:
            if not self._tags.holds(hold.block, hold.tag):
                raise StaleBlockError(f"block {hold.block} holds something else")
        return self._kv.export_blocks([hold.block for hold in holds], first_layer, num_layers)

    def put_in(self, digests: ListOf[bytes], rows: Tensor) -> list[Hold]:
        """Fill fresh blocks with ``rows`` (as :meth:`export` gives them) and index them; all are held.

        Where a block with the same content is there already, that one is held and the row is left.

        Raises:
            OutOfBlocksError: when there is no room; nothing is changed then.
        """
        holds = {at: hold for at, digest in enumerate(digests) if (hold := self.hold(digest)) is not None}
        fresh = [at for at in range(len(digests)) if at not in holds]
        try:
            blocks = self._pool.take(len(fresh))
        except OutOfBlocksError:
            self.release(list(holds.values()))
            raise
        tags = self._pool.tags_of(blocks)
        if fresh:
            self._kv.import_blocks(blocks, rows[torch.tensor(fresh)])
        for at, block, tag in zip(fresh, blocks, tags, strict=True):
            self._tags.write(block, tag)
            self._cache.adopt(digests[at], block, tag)
            holds[at] = self._enter(digests[at], block, tag)
        return [holds[at] for at in range(len(digests))]

    def release(self, holds: ListOf[Hold]) -> None:
        """Give holds up, those of the last blocks of a prefix first. The contents stay as long as there is
        room for them.
        """
        for hold in reversed(holds):
            expect(self._holds.pop(hold.number, None) is hold, "a hold was released twice")
            self._pool.release([hold.block])

    def tables(self) -> list[list[int]]:
        """The holds as block tables, for the check of the pool's books."""
        return [[hold.block] for hold in self._holds.values()]

    def _enter(self, digest: bytes, block: int, tag: int) -> Hold:
        self._last_number += 1
        hold = Hold(self._last_number, digest, block, tag)
        self._holds[hold.number] = hold
        return hold
