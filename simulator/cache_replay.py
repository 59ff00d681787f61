"""Hit ratios without time: a trace through the engine's own block pool and prefix cache, request by request.

The leading run of a prompt's blocks that are cached counts as hit; what is not is computed and kept, the tail
evicted first. With several pools a policy says where each request goes. This is how published hit ratios of a
trace are counted, so that they can be compared.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass, field

from backend.engine.block_pool import BlockPool
from backend.engine.messages import SamplingParams, SequenceRequest
from backend.engine.prefix_cache import PrefixCache
from backend.engine.sequence import Sequence
from simulator.policies import Policy
from simulator.trace import TraceEntry, request_of

_SAMPLING = SamplingParams(max_tokens=1, ignore_eos=True)


@dataclass(slots=True)
class CountingPool:
    """One replica's blocks. Named and weighted, so that policies can rank it."""

    id: str
    num_blocks: int
    weight: float = 1.0
    num_in_flight: int = 0
    load_tokens: int = 0
    uncached_tokens: int = 0
    _cache: PrefixCache = field(default_factory=lambda: PrefixCache(1))
    _pool: BlockPool | None = None

    def __post_init__(self) -> None:
        self._pool = BlockPool(self.num_blocks, self._cache)

    def __hash__(self) -> int:
        return id(self)

    def __eq__(self, other: object) -> bool:
        return self is other

    def num_matching(self, request: object) -> int:
        """Leading blocks of the request that are cached here now."""
        found = 0
        for digest in request.digests:  # type: ignore[attr-defined]
            if not self._cache.holds(digest):
                break
            found += 1
        return found

    def take_in(self, entry: TraceEntry, block_tokens: int) -> tuple[int, int]:
        """(blocks, tokens) of the entry that were cached; all of it is afterwards, as far as it fits."""
        assert self._pool is not None
        sequence = _sequence(entry)
        matched = self._cache.match(sequence) or []
        self._pool.share(matched)
        wanted = len(entry.hash_ids) - len(matched)
        taken = self._pool.take(min(wanted, self._pool.num_available))
        sequence.block_table = matched + taken
        sequence.num_registered_blocks = len(matched)
        sequence.num_computed_tokens = len(sequence.block_table)
        self._cache.register_full_blocks(sequence)
        self._pool.release(sequence.block_table)
        hit_tokens = min(len(matched) * block_tokens, entry.input_length)
        self.uncached_tokens += entry.input_length - hit_tokens
        self.load_tokens += entry.input_length - hit_tokens
        return len(matched), hit_tokens


@dataclass(frozen=True, slots=True)
class HitRatios:
    """Shares of blocks and tokens; ``imbalance`` is the largest pool's uncached tokens over the mean."""

    blocks: float
    tokens: float
    imbalance: float


def replay(
    entries: Iterable[TraceEntry],
    pools: tuple[CountingPool, ...],
    policy: Policy,
    block_tokens: int,
    progress: Callable[[int], None] = lambda num: None,
) -> HitRatios:
    """Send every entry where ``policy`` says and count."""
    num_blocks = hit_blocks = num_tokens = hit_tokens = 0
    by_id = {pool.id: pool for pool in pools}
    for number, entry in enumerate(entries):
        chosen = next(iter(policy(request_of(entry, number), pools)))
        blocks, tokens = by_id[chosen.id].take_in(entry, block_tokens)
        num_blocks += len(entry.hash_ids)
        num_tokens += entry.input_length
        hit_blocks += blocks
        hit_tokens += tokens
        if number % 1000 == 0:
            progress(number)
    loads = [pool.uncached_tokens for pool in pools]
    mean = sum(loads) / len(loads)
    return HitRatios(
        hit_blocks / num_blocks if num_blocks else 0.0,
        hit_tokens / num_tokens if num_tokens else 0.0,
        max(loads) / mean if mean else 0.0,
    )


def _sequence(entry: TraceEntry) -> Sequence:
    """One token a block, and one more, which the engine always leaves to compute."""
    sequence = Sequence(
        SequenceRequest(sequence_id=0, prompt_token_ids=[0] * (len(entry.hash_ids) + 1), sampling=_SAMPLING)
    )
    sequence.block_hashes = [hash_id.to_bytes(8, "big") for hash_id in entry.hash_ids]
    return sequence
