"""Between the KV cache of an engine and the tiers below it.

Domain: blocks that the prefix cache gives up are copied down before they are overwritten. A sequence at the
head of the queue whose next blocks are in a tier is held back, while the others go on, until they are loaded,
its deadline is over or something was wrong; then it is admitted with what the cache has, whatever that is.
So ``cached_prompt_tokens``, fixed at admission, counts exactly what was not computed for it.

State: the promotion that is on its way, at most one.

Invariants: blocks on their way up are kept by holds that end with the promotion; a promotion ends at its
deadline at the latest; a block is only copied down while it holds what its tag says.

Time: at most ``max_blocks_per_step`` blocks are copied each way between two steps.
"""

from __future__ import annotations

from collections import Counter, deque
from collections.abc import Callable
from collections.abc import Sequence as ListOf
from concurrent.futures import Future
from dataclasses import dataclass, field
from itertools import islice

import torch

from backend.config import TierConfig
from backend.engine.block_pool import OutOfBlocksError
from backend.engine.block_store import BlockStore, Hold
from backend.engine.block_tags import BlockTags
from backend.engine.kv_blocks import KvBlocks
from backend.engine.messages import TierStats
from backend.engine.prefix_cache import CachedBlock
from backend.engine.sequence import Sequence, SequenceStatus
from backend.transfer.promotion import PromotionRule, Tier
from backend.transfer.tier_thread import Loaded
from backend.transfer.tiers import Tiers

WRITE_BACK_INTERVAL_S = 1.0
"""How often an engine that is busy looks for blocks that the disk has not got."""


@dataclass(slots=True)
class _Promotion:
    sequence: Sequence
    wanted: deque[tuple[bytes, Tier]]
    deadline_s: float
    holds: list[Hold]
    coming: deque[tuple[bytes, Tier, Future[Loaded]]] = field(default_factory=deque)


class Tiering:
    """See the module. All methods belong between steps, but for what the prefix cache calls."""

    def __init__(
        self,
        tiers: Tiers,
        store: BlockStore,
        tags: BlockTags,
        kv: KvBlocks,
        config: TierConfig,
        clock_s: Callable[[], float],
    ) -> None:
        self._tiers = tiers
        self._store = store
        self._cache = store.cache
        self._tags = tags
        self._kv = kv
        self._config = config
        self._clock_s = clock_s
        self.rule = PromotionRule()
        self._promotion: _Promotion | None = None
        self._last_sequence_id: int | None = None
        self._wrote_back_at_s = clock_s()
        self._queries = self._hits = self._num_ended_early = self._num_refused = 0
        self._num_promoted: Counter[Tier] = Counter()
        self._cache.on_evict = self._take_down

    @property
    def is_promoting(self) -> bool:
        return self._promotion is not None

    def holds_back(self, sequence: Sequence, num_matched: int) -> bool:
        """Whether a sequence that could be admitted now, with ``num_matched`` blocks, waits for more of them.

        Starts their promotion when that is expected to cost less than to compute them. Once a sequence.
        """
        if self._promotion is not None:
            return self._promotion.sequence is sequence
        if sequence.sequence_id == self._last_sequence_id:
            return False
        self._last_sequence_id = sequence.sequence_id
        size = self._store.layout.block_size
        end = (sequence.num_tokens - 1) // size
        self._tiers.touch(sequence.block_hashes[:num_matched])
        self._queries += (end - num_matched) * size
        places = self._tiers.run_of(self._cache.digest(sequence, at) for at in range(num_matched, end))
        if not places:
            return False
        block_bytes = self._store.layout.block_bytes
        num_bytes = {tier: count * block_bytes for tier, count in Counter(places).items()}
        if not self.rule.is_worth(num_bytes, len(places) * size):
            self._num_refused += 1
            return False
        self._begin(sequence, num_matched, places)
        return True

    def advance(self) -> None:
        """Bring some blocks of the promotion up; ends it when it is over."""
        now = self._promotion
        if now is None:
            return
        if now.sequence.status is not SequenceStatus.WAITING or self._clock_s() >= now.deadline_s:
            self._end(now, early=True)
            return
        limit = self._config.max_blocks_per_step
        while now.wanted and len(now.coming) < limit:
            digest, tier = now.wanted.popleft()
            now.coming.append((digest, tier, self._tiers.fetch(digest)))
        ready: list[tuple[bytes, Tier, Future[Loaded]]] = []
        while now.coming and now.coming[0][2].done() and len(ready) < limit:
            ready.append(now.coming.popleft())
        if not self._take_up(now, ready):
            self._end(now, early=True)
        elif not now.wanted and not now.coming:
            self._end(now, early=False)

    def write_back(self, *, is_idle: bool) -> bool:
        """Have unused blocks that only the cache has written to the disk, so that a restart finds them;
        whether there may be more. A busy engine does it now and then.
        """
        now_s = self._clock_s()
        disk = self._tiers.disk
        if disk is None or not disk.is_writing:
            return False
        if not is_idle and now_s - self._wrote_back_at_s < WRITE_BACK_INTERVAL_S:
            return False
        self._wrote_back_at_s = now_s
        limit = min(self._config.max_blocks_per_step, disk.room_bytes // self._store.layout.block_bytes)
        unsaved = (each for each in self._cache.unused_newest_first() if not disk.holds(each.digest))
        chosen = list(islice(unsaved, limit))
        # The newest last: what is evicted first here is evicted first there.
        for digest, content in reversed(self._contents(self._intact(chosen))):
            disk.write(digest, content)
        return len(chosen) == limit and is_idle

    def close(self) -> None:
        """Write what can be written within ``flush_s``, and let go of everything."""
        if self._promotion is not None:
            self._end(self._promotion, early=True)
        until_s = self._clock_s() + self._config.flush_s
        while self._clock_s() < until_s and self.write_back(is_idle=True):
            if self._tiers.disk is not None:
                self._tiers.disk.drain(max(until_s - self._clock_s(), 0.0))
        self._tiers.close(max(until_s - self._clock_s(), 0.0))

    def stats(self) -> TierStats:
        """Gauges as of now and counters since the start."""
        host, disk = self._tiers.host, self._tiers.disk
        return TierStats(
            queries=self._queries,
            hits=self._hits,
            num_demoted=self._tiers.num_demoted,
            num_from_host=self._num_promoted["host"],
            num_from_disk=self._num_promoted["disk"],
            num_refused=self._num_refused,
            num_ended_early=self._num_ended_early,
            num_host_bytes=0 if host is None else host.num_bytes,
            num_disk_bytes=0 if disk is None else disk.num_bytes,
            num_corrupt=0 if disk is None else disk.num_corrupt,
            num_disk_failures=0 if disk is None else disk.num_failures,
            num_dropped=0 if disk is None else disk.num_dropped,
            is_disk_writable=disk is not None and disk.is_writing,
        )

    def _begin(self, sequence: Sequence, num_matched: int, places: ListOf[Tier]) -> None:
        digests = sequence.block_hashes[num_matched : num_matched + len(places)]
        patience_s = self._config.promotion_timeout_s
        computing_s = self.rule.compute_s(len(places) * self._store.layout.block_size)
        if computing_s is not None:  # longer than that it is no gain
            patience_s = min(patience_s, max(computing_s, self._config.min_promotion_s))
        holds = [self._store.hold(digest) for digest in sequence.block_hashes[:num_matched]]
        self._promotion = _Promotion(
            sequence,
            deque(zip(digests, places, strict=True)),
            self._clock_s() + patience_s,
            [hold for hold in holds if hold is not None],
        )

    def _take_up(self, now: _Promotion, ready: ListOf[tuple[bytes, Tier, Future[Loaded]]]) -> bool:
        """Put loaded blocks into the cache, up to the first that could not be; whether all were."""
        loaded = [(digest, tier, future.result()) for digest, tier, future in ready]
        usable = next((at for at, each in enumerate(loaded) if each[2].content is None), len(loaded))
        batch = loaded[:usable]
        unused = loaded[usable:]
        if batch:
            started_at_s = self._clock_s()
            contents = bytearray(b"".join(each.content or b"" for _, _, each in batch))
            rows = torch.frombuffer(contents, dtype=torch.uint8).view(len(batch), -1)
            try:
                now.holds += self._store.put_in([digest for digest, _, _ in batch], rows)
            except OutOfBlocksError:
                unused, batch = loaded, []
            self._observe(batch, self._clock_s() - started_at_s)
        for digest, tier, each in unused:
            self._put_back(digest, tier, each)
        return not unused

    def _observe(self, batch: ListOf[tuple[bytes, Tier, Loaded]], copying_s: float) -> None:
        block_bytes, size = self._store.layout.block_bytes, self._store.layout.block_size
        for tier, count in Counter(tier for _, tier, _ in batch).items():
            reading_s = sum(each.seconds for _, own, each in batch if own == tier)
            self.rule.observe_load(tier, count * block_bytes, reading_s + copying_s * count / len(batch))
            self._num_promoted[tier] += count
            self._hits += count * size

    def _end(self, now: _Promotion, *, early: bool) -> None:
        self._promotion = None
        self._num_ended_early += early
        for digest, tier, future in now.coming:
            if future.done():
                self._put_back(digest, tier, future.result())
        self._store.release(now.holds)

    def _put_back(self, digest: bytes, tier: Tier, loaded: Loaded) -> None:
        if tier == "host" and loaded.content is not None:
            self._tiers.put(digest, loaded.content)

    def _take_down(self, evicted: list[CachedBlock]) -> None:
        """Copy blocks down that are about to be overwritten. What is too much for one step is lost: those
        that were to go first."""
        chosen = self._intact(evicted[-self._config.max_blocks_per_step :])
        if self._tiers.host is None and (disk := self._tiers.disk) is not None:
            if not disk.is_writing:
                return
            chosen = [each for each in chosen if not disk.holds(each.digest)]
        for digest, content in self._contents(chosen):
            self._tiers.put(digest, content)

    def _intact(self, blocks: ListOf[CachedBlock]) -> list[CachedBlock]:
        return [each for each in blocks if self._tags.holds(each.block, each.tag)]

    def _contents(self, blocks: ListOf[CachedBlock]) -> list[tuple[bytes, bytes]]:
        if not blocks:
            return []
        rows = self._kv.export_blocks([each.block for each in blocks])
        return [(each.digest, row.numpy().tobytes()) for each, row in zip(blocks, rows, strict=True)]
