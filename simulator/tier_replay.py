"""Hit ratios of a trace with tiers below the block pool: the engine's own pool, prefix cache and tiers.

As :mod:`simulator.cache_replay` counts, for one pool. What the pool gives up goes down; the leading run of a
prompt that goes on in a tier comes up and counts as hit. Contents are their own names, and are compared.
"""

from __future__ import annotations

from collections.abc import Iterable

from backend.engine.block_pool import BlockPool
from backend.engine.messages import SamplingParams, SequenceRequest
from backend.engine.prefix_cache import DIGEST_BYTES, CachedBlock, PrefixCache
from backend.engine.sequence import Sequence, expect
from backend.transfer.payload import KvLayout
from backend.transfer.tiers import Tiers
from simulator.cache_replay import HitRatios
from simulator.trace import TraceEntry

CONTENT_BYTES = DIGEST_BYTES
LAYOUT = KvLayout("trace", "uint8", 1, 1, (((CONTENT_BYTES,),),))
DRAIN_S = 60.0
_SAMPLING = SamplingParams(max_tokens=1, ignore_eos=True)


class TieredPool:
    """A pool of ``num_blocks`` above ``tiers``."""

    def __init__(self, num_blocks: int, tiers: Tiers) -> None:
        self._tiers = tiers
        self._cache = PrefixCache(1)
        self._cache.on_evict = self._take_down
        self._pool = BlockPool(num_blocks, self._cache)

    def take_in(self, entry: TraceEntry) -> int:
        """Blocks of the entry that were in pool or tiers; all of it is afterwards, as far as it fits."""
        sequence = _sequence(entry)
        digests = sequence.block_hashes
        matched = self._cache.match(sequence) or []
        self._pool.share(matched)
        num_up = self._bring_up(digests[len(matched) :])
        taken = self._pool.take(min(len(digests) - len(matched), self._pool.num_available))
        sequence.block_table = matched + taken
        sequence.num_registered_blocks = len(matched)
        sequence.num_computed_tokens = len(sequence.block_table)
        self._cache.register_full_blocks(sequence)
        self._pool.release(sequence.block_table)
        self._save(digests)
        return len(matched) + num_up

    def _bring_up(self, digests: list[bytes]) -> int:
        places = self._tiers.run_of(digests)
        for digest in digests[: len(places)]:
            content = self._tiers.fetch(digest).result().content
            expect(content == digest, "a tier gave something else than it was given")
        return len(places)

    def _save(self, digests: list[bytes]) -> None:
        """What an engine does in idle moments; the head last, so that it goes last."""
        if self._tiers.disk is not None:
            for digest in reversed(digests):
                self._tiers.save(digest, digest)
            expect(self._tiers.disk.drain(DRAIN_S), "the disk does not get on")

    def _take_down(self, evicted: list[CachedBlock]) -> None:
        for each in evicted:
            self._tiers.put(each.digest, each.digest)


def replay_tiers(entries: Iterable[TraceEntry], pool: TieredPool) -> HitRatios:
    """Send every entry to the pool and count."""
    num_blocks = hit_blocks = num_tokens = 0
    hit_tokens = 0.0
    for entry in entries:
        hits = pool.take_in(entry)
        num_blocks += len(entry.hash_ids)
        hit_blocks += hits
        num_tokens += entry.input_length
        hit_tokens += entry.input_length * hits / max(len(entry.hash_ids), 1)
    return HitRatios(hit_blocks / max(num_blocks, 1), hit_tokens / max(num_tokens, 1), 1.0)


def _sequence(entry: TraceEntry) -> Sequence:
    """One token a block, and one more, which the engine always leaves to compute."""
    sequence = Sequence(
        SequenceRequest(sequence_id=0, prompt_token_ids=[0] * (len(entry.hash_ids) + 1), sampling=_SAMPLING)
    )
    sequence.block_hashes = [hash_id.to_bytes(DIGEST_BYTES, "big") for hash_id in entry.hash_ids]
    return sequence
