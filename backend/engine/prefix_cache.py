"""Which KV blocks hold which tokens, so that a prompt that begins like an earlier one is not computed again.

Domain: a full block is named by its digest, which chains over everything before it: the digest of its parent,
its token ids, and extra bytes for what the ids do not say (an image behind placeholder tokens). The chain is
rooted in the request's salt, so equal prompts of different accounts have nothing in common.

State: the two-way index of digests and block ids; the blocks that nobody uses, least recently used first; and
the claims: digests of prompt blocks that a running sequence is about to compute.

Invariants: a digest names at most one block and a block has at most one digest; an unused block in here has a
digest; a claim belongs to a running sequence and goes when its block is registered or the sequence leaves.

Time: O(blocks looked at). A sequence's blocks are hashed once, when first asked for.
"""

from __future__ import annotations

import struct
from collections import OrderedDict
from collections.abc import Callable, Iterator
from collections.abc import Sequence as ListOf
from dataclasses import dataclass
from functools import partial
from hashlib import blake2b
from itertools import takewhile
from operator import is_not

from backend.engine.sequence import Sequence, expect

DIGEST_BYTES = 32
_ROOT_DOMAIN = b"embergate.kv.1.root"
_BLOCK_DOMAIN = b"embergate.kv.1.block"
_LENGTH = struct.Struct("<I")
_is_found = partial(is_not, None)


def root_digest(salt: bytes) -> bytes:
    """The parent of a sequence's first block. Equal exactly for equal salts."""
    return blake2b(b"".join((_ROOT_DOMAIN, _LENGTH.pack(len(salt)), salt)), digest_size=DIGEST_BYTES).digest()


def block_digest(parent: bytes, token_ids: ListOf[int], extra: bytes = b"") -> bytes:
    """The name of a full block after ``parent``.

    Every part has a fixed or a stated length, so that no two different blocks feed the same bytes to the
    hash. Token ids are packed as little-endian 32-bit integers.
    """
    count = len(token_ids)
    packed = struct.pack(f"<{count}i", *token_ids)
    parts = (_BLOCK_DOMAIN, parent, _LENGTH.pack(count), packed, _LENGTH.pack(len(extra)), extra)
    return blake2b(b"".join(parts), digest_size=DIGEST_BYTES).digest()


@dataclass(frozen=True, slots=True)
class CachedBlock:
    """A block by its content: ``tag`` is the one under which it was filled."""

    digest: bytes
    block: int
    tag: int


class PrefixCache:
    """Index of full blocks by content, and the order in which unused ones are given up."""

    def __init__(self, block_size: int) -> None:
        self._block_size = block_size
        self._block_by_digest: dict[bytes, int] = {}
        self._digest_by_block: dict[int, bytes] = {}
        self._tag_by_digest: dict[bytes, int] = {}
        self._unused: OrderedDict[int, None] = OrderedDict()
        self._claims: dict[bytes, int] = {}
        self.num_evictions = 0
        self.on_evict: Callable[[list[CachedBlock]], None] | None = None
        """Sees blocks that are given up, least recently used first, while they still hold their content."""

    @property
    def num_unused(self) -> int:
        """Blocks kept for their content only."""
        return len(self._unused)

    def match(self, sequence: Sequence) -> list[int] | None:
        """The registered blocks that hold the longest known prefix of ``sequence``, in order.

        At least one known token is always left to compute. Returns None when the next block is being computed
        by a running sequence right now: waiting for it costs less than computing it twice.
        """
        find = self._block_by_digest.get
        num_matchable = (sequence.num_tokens - 1) // self._block_size
        # What is hashed already, in one go; then on, hashing, up to the first miss.
        hashed = sequence.block_hashes[:num_matchable]
        blocks: list[int] = list(takewhile(_is_found, map(find, hashed)))  # type: ignore[arg-type]
        for index in range(len(blocks), num_matchable):
            digest = self.digest(sequence, index)
            block = find(digest)
            if block is None:
                return None if digest in self._claims else blocks
            blocks.append(block)
        return blocks

    def tags_of(self, sequence: Sequence, count: int) -> list[int]:
        """The tags under which the first ``count`` blocks, which :meth:`match` found, were filled."""
        return [self._tag_by_digest[self.digest(sequence, index)] for index in range(count)]

    def find(self, digest: bytes) -> tuple[int, int] | None:
        """The block with this content, and the tag under which it was filled."""
        block = self._block_by_digest.get(digest)
        return None if block is None else (block, self._tag_by_digest[digest])

    def adopt(self, digest: bytes, block: int, tag: int) -> bool:
        """Index a block in use that was filled from elsewhere; False when another has its content already."""
        if digest in self._block_by_digest:
            return False
        self._block_by_digest[digest] = block
        self._digest_by_block[block] = digest
        self._tag_by_digest[digest] = tag
        return True

    def forget(self, digest: bytes, block: int) -> None:
        """Drop the digest of a block in use that turned out to hold something else."""
        if self._block_by_digest.get(digest) != block or block in self._unused:
            return  # an unused block needs its digest until it is evicted
        del self._block_by_digest[digest], self._tag_by_digest[digest]
        if self._digest_by_block.get(block) == digest:
            del self._digest_by_block[block]

    def claim(self, sequence: Sequence) -> None:
        """Announce the full blocks that ``sequence`` is about to compute (after :meth:`match`)."""
        for index in range(sequence.num_registered_blocks, sequence.num_tokens // self._block_size):
            self._claims.setdefault(self.digest(sequence, index), sequence.sequence_id)

    def disclaim(self, sequence: Sequence) -> None:
        """Withdraw what :meth:`claim` announced and the sequence did not get to compute."""
        for digest in sequence.block_hashes[sequence.num_registered_blocks :]:
            if self._claims.get(digest) == sequence.sequence_id:
                del self._claims[digest]

    def register_full_blocks(self, sequence: Sequence) -> None:
        """Index the blocks of ``sequence`` that have become full since the last call.

        When another block already has the same content, that one stays the one in the index; the sequence
        keeps its own, which is then freed like any partial block.
        """
        num_full = sequence.num_computed_tokens // self._block_size
        if num_full <= sequence.num_registered_blocks:
            return
        for index in range(sequence.num_registered_blocks, num_full):
            digest = self.digest(sequence, index)
            block = sequence.block_table[index]
            if digest not in self._block_by_digest:
                self._block_by_digest[digest] = block
                self._digest_by_block[block] = digest
                # A simulator keeps no tags: it has no memory that could be wrong.
                self._tag_by_digest[digest] = sequence.block_tags[index] if sequence.block_tags else 0
            self._claims.pop(digest, None)
        sequence.num_registered_blocks = num_full

    def digest(self, sequence: Sequence, index: int) -> bytes:
        """The digest of the full block ``index`` of ``sequence``, hashed on first use."""
        hashes, size = sequence.block_hashes, self._block_size
        while len(hashes) <= index:
            at = len(hashes)
            parent = hashes[-1] if hashes else root_digest(sequence.cache_salt)
            token_ids = sequence.token_ids[at * size : (at + 1) * size]
            hashes.append(block_digest(parent, token_ids, sequence.extra_of_block(at, size)))
        return hashes[index]

    def keep(self, blocks: ListOf[int]) -> list[int]:
        """Keep blocks that nobody uses any more, the last one as the most recently used.

        Returns:
            Those that have no digest and are not kept.
        """
        known, unused = self._digest_by_block, self._unused
        others: list[int] = []
        for block in blocks:
            if block in known:
                unused[block] = None
            else:
                others.append(block)
        return others

    def reuse(self, blocks: ListOf[int]) -> None:
        """Take unused blocks back into use with their content."""
        unused = self._unused
        for block in blocks:
            del unused[block]

    def evict(self, count: int) -> list[int]:
        """Forget the ``count`` least recently used unused blocks and return them, after ``on_evict`` saw
        them.
        """
        blocks: list[int] = []
        evicted: list[CachedBlock] = []
        for _ in range(count):
            block, _ = self._unused.popitem(last=False)
            digest = self._digest_by_block.pop(block)
            if self._block_by_digest.get(digest) == block:
                del self._block_by_digest[digest]
                evicted.append(CachedBlock(digest, block, self._tag_by_digest.pop(digest)))
            blocks.append(block)
        self.num_evictions += count
        if self.on_evict is not None and evicted:
            self.on_evict(evicted)
        return blocks

    def unused_newest_first(self) -> Iterator[CachedBlock]:
        """The unused blocks, last to be evicted first."""
        for block in reversed(self._unused):
            digest = self._digest_by_block[block]
            if self._block_by_digest.get(digest) == block:
                yield CachedBlock(digest, block, self._tag_by_digest[digest])

    def unused_blocks(self) -> list[int]:
        """The unused blocks, next to be evicted first."""
        return list(self._unused)

    def holds(self, digest: bytes) -> bool:
        """Whether a block with this content is indexed now."""
        return digest in self._block_by_digest

    def is_registered(self, block: int) -> bool:
        return block in self._digest_by_block

    def check_invariants(self, running: ListOf[Sequence]) -> None:
        """Raise InvariantError with the first thing that is wrong. O(blocks)."""
        for digest, block in self._block_by_digest.items():
            expect(self._digest_by_block.get(block) == digest, f"block {block} is indexed under two digests")
        expect(len(self._block_by_digest) == len(self._digest_by_block), "a digest leads to no block")
        for block in self._unused:
            expect(block in self._digest_by_block, f"unused block {block} has no digest")
        ids = {sequence.sequence_id for sequence in running}
        expect(set(self._claims.values()) <= ids, "a claim belongs to a sequence that is not running")
