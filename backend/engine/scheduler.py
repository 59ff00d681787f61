"""What the engine computes next: continuous batching, chunked prefill, preemption, admission.

Domain: waiting sequences are admitted in order of arrival and then run until they are finished. A step
computes one token for every running sequence that decodes, then prefill chunks, all within a budget of
tokens: half of what is left for the oldest prompt, the rest for those that are done soonest.

State: the queue, the batch, and through them every block table. Pure: no tensors, no clock, no sockets.

Invariants:

* The batch is in order of arrival, and so is the queue; everyone in the batch arrived before everyone in the
  queue (preemption takes the youngest, and puts it back at the head). So the oldest always makes progress,
  and everyone finishes.
* Blocks for all known tokens of a sequence are taken at admission, so only decodes can run short.
* A step never has more tokens than ``max_tokens_per_step``, a batch never more than ``max_running``
  sequences.

A step is :meth:`Scheduler.plan`, then the model, then :meth:`Scheduler.accept` for each new token and
:meth:`Scheduler.settle`; besides those, only :meth:`Scheduler.add` and :meth:`Scheduler.finish` in between.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Collection
from collections.abc import Sequence as ListOf

from backend.engine.block_pool import BlockPool
from backend.engine.counters import SchedulerCounters
from backend.engine.limits import RefusedError, SchedulerLimits
from backend.engine.messages import SequenceFinish
from backend.engine.prefix_cache import PrefixCache
from backend.engine.sequence import Sequence, SequenceStatus, expect
from backend.engine.speculation import PromptLookup
from backend.engine.step import ScheduledChunk
from backend.engine.step_builder import Step, StepBuilder

AllowPrefill = Callable[[int, int], int | None]
HoldsBack = Callable[[Sequence, int], bool]


class Scheduler:
    """The queue and the batch of one engine."""

    def __init__(
        self,
        limits: SchedulerLimits,
        pool: BlockPool,
        cache: PrefixCache | None = None,
        lookup: PromptLookup | None = None,
    ) -> None:
        self.limits = limits
        self._lookup = lookup
        self._ends: dict[int, SequenceFinish] = {}
        self.counters = SchedulerCounters()
        self._pool = pool
        self._cache = cache
        self._waiting: deque[Sequence] = deque()
        self._running: list[Sequence] = []
        self._by_id: dict[int, Sequence] = {}
        self._num_media_bytes = 0
        self.holds_back: HoldsBack = lambda sequence, num_matched: False

    @property
    def num_waiting(self) -> int:
        return len(self._waiting)

    @property
    def num_running(self) -> int:
        return len(self._running)

    @property
    def has_work(self) -> bool:
        return bool(self._by_id)

    def add(self, sequence: Sequence, *, reject_if_busy: bool = False) -> None:
        """Queue a sequence.

        Raises:
            RefusedError: when it could never fit, the queue is full, or (``reject_if_busy``) it would have to
                wait for a place in the batch.
            ValueError: when its id is in use.
        """
        if sequence.sequence_id in self._by_id:
            raise ValueError(f"sequence_id: {sequence.sequence_id} is in use")
        self._refuse_what_never_fits(sequence)
        if reject_if_busy and len(self._by_id) >= self.limits.max_running:
            raise RefusedError("busy", f"all {self.limits.max_running} places in the batch are taken")
        if len(self._by_id) >= self.limits.max_running + self.limits.max_waiting:
            raise RefusedError("queue_full", f"{len(self._by_id)} sequences are running or waiting already")
        num_media_bytes = self._num_media_bytes + sequence.num_media_bytes
        if self._num_media_bytes and num_media_bytes > self.limits.max_media_bytes:
            raise RefusedError("queue_full", "running and waiting sequences take all the room for images")
        self._num_media_bytes = num_media_bytes
        self._waiting.append(sequence)
        self._by_id[sequence.sequence_id] = sequence

    def finish(self, sequence_id: int, reason: SequenceFinish = "abort") -> Sequence | None:
        """End a sequence in whatever state it is and free its blocks at once; None when there is none."""
        sequence = self._by_id.get(sequence_id)
        if sequence is not None:
            self._end(sequence, reason)
        return sequence

    def condemn(self, sequence: Sequence, wrong_places: ListOf[int]) -> None:
        """End a running sequence whose blocks at ``wrong_places`` hold something else.

        Nobody finds those again. A block that was handed to somebody else meanwhile stays theirs.
        """
        for place in wrong_places:
            if self._cache is not None and place < len(sequence.block_hashes):
                self._cache.forget(sequence.block_hashes[place], sequence.block_table[place])
        sequence.block_table = self._pool.still_held(sequence.block_table, sequence.block_tags)
        self._end(sequence, "error")

    def expire(self, arrived_before_s: float) -> list[Sequence]:
        """End the sequences that arrived before then and were never admitted."""
        expired: list[Sequence] = []
        for sequence in self._waiting:
            if sequence.cached_prompt_tokens is not None:
                continue  # preempted: it has been served in time, and its reader has tokens already
            if sequence.arrived_at_s >= arrived_before_s:
                break
            expired.append(sequence)
        for sequence in expired:
            self._end(sequence, "error")
        return expired

    def plan(self, allow_prefill: AllowPrefill = lambda num_decodes, num_prefills: None) -> Step:
        """Choose what to compute next: something, whenever there is work and not all of it is held back.

        Args:
            allow_prefill: at most so many prefill tokens (at least 1), by the number of sequences that decode
                in this step and of those that wait for their first token; None for no limit.
        """
        step = StepBuilder(self.limits.max_tokens_per_step)
        prefilling = self._plan_decodes(step)
        allowance = allow_prefill(len(step.chunks), len(prefilling) + len(self._waiting))
        if allowance is not None:
            step.budget = min(step.budget, allowance)
        if self._waiting and step.budget:
            prefilling += self._admit()
        self._plan_prefills(step, prefilling)
        if self._lookup is not None:
            self._plan_drafts(step, self._lookup)
        return step.build()

    def accept(self, sequence: Sequence, token_id: int, *, is_last: bool = False) -> bool:
        """Take in a new token of a sequence whose chunk was computed; whether more may follow.

        Args:
            is_last: the sequence stops with it, whatever it is.

        The next one may be accepted within the same step where this one is the chunk's next guess. Nothing
        changes for a sequence that has ended since the step was planned.
        """
        if sequence.status is not SequenceStatus.RUNNING:
            return False
        sequence.token_ids.append(token_id)
        self.counters.num_completion_tokens += 1
        if is_last or token_id in sequence.stop_token_ids:
            self._ends[sequence.sequence_id] = "stop"
        elif (
            sequence.num_generated_tokens >= sequence.sampling.max_tokens
            or sequence.num_tokens >= self.limits.max_model_len
        ):
            self._ends[sequence.sequence_id] = "length"
        else:
            return True
        return False

    def settle(self, step: Step) -> None:
        """Enter what a step computed, once its tokens are accepted; ends the sequences that are complete."""
        for chunk, sequence in zip(step.plan.chunks, step.sequences, strict=True):
            if sequence.status is not SequenceStatus.RUNNING:
                continue
            self.counters.num_computed_tokens += len(chunk.token_ids)
            sequence.num_computed_tokens += len(chunk.token_ids) - chunk.num_drafts
            if chunk.num_drafts:
                self._settle_drafts(sequence, chunk)
            if self._cache is not None:
                self._cache.register_full_blocks(sequence)
            if (reason := self._ends.pop(sequence.sequence_id, None)) is not None:
                self._end(sequence, reason)

    def commit(
        self, step: Step, token_ids: ListOf[int], complete: Collection[Sequence] = frozenset()
    ) -> None:
        """Accept one new token for each of ``step.rows`` and settle; those of ``complete`` stop with it."""
        for sequence, token_id in zip(step.rows, token_ids, strict=True):
            self.accept(sequence, token_id, is_last=sequence in complete)
        self.settle(step)

    def check_invariants(self, other_tables: ListOf[ListOf[int]] = ()) -> None:
        """Raise InvariantError with the first thing that does not add up. O(blocks); for idle moments.

        Args:
            other_tables: of blocks that are held besides by sequences.
        """
        size = self.limits.block_size
        everyone = [*self._running, *self._waiting]
        expect(len(everyone) == len(self._by_id), "a sequence was lost or is known twice")
        expect(len(self._running) <= self.limits.max_running, "the batch is larger than max_running")
        media_bytes = sum(sequence.num_media_bytes for sequence in everyone)
        expect(media_bytes == self._num_media_bytes, "bytes of images were lost or counted twice")
        self._pool.check_invariants([*(sequence.block_table for sequence in everyone), *other_tables])
        for sequence in everyone:
            expect(self._by_id.get(sequence.sequence_id) is sequence, "a sequence is not under its id")
            cached = sequence.cached_prompt_tokens
            expect(cached is None or 0 <= cached < sequence.num_prompt_tokens, "cached more than the prompt")
            expect(
                sequence.num_computed_tokens < sequence.num_tokens, "a sequence has nothing left to compute"
            )
        for sequence in self._running:
            expect(sequence.status is SequenceStatus.RUNNING, "one in the batch is not running")
            expect(sequence.cached_prompt_tokens is not None, "one in the batch was never admitted")
            num_slots = len(sequence.block_table) * size
            expect(sequence.num_computed_tokens <= num_slots, "KV outside of the block table")
            num_needed = self._blocks_for(sequence.num_tokens)
            expect(len(sequence.block_table) <= num_needed, "blocks for more tokens than are known")
        for sequence in self._waiting:
            expect(sequence.status is SequenceStatus.WAITING, "one in the queue is not waiting")
            expect(not sequence.block_table, "one in the queue holds blocks")
        if self._cache is not None:
            self._cache.check_invariants(self._running)

    def _refuse_what_never_fits(self, sequence: Sequence) -> None:
        limits = self.limits
        prompt, output = sequence.num_prompt_tokens, sequence.sampling.max_tokens
        num_blocks = self._blocks_for(prompt + output - 1)  # the last token's KV is never needed
        if prompt + output > limits.max_model_len:
            longest, why = limits.max_model_len, ""
        elif num_blocks > self._pool.num_blocks:
            longest, why = self._pool.num_blocks * limits.block_size, " on this replica"
        else:
            return
        raise RefusedError(
            "context_length_exceeded",
            f"This model's maximum context length is {longest} tokens{why}. However, you requested "
            f"{prompt + output} tokens ({prompt} in the messages, {output} in the completion).",
        )

    def _blocks_for(self, num_tokens: int) -> int:
        return -(-num_tokens // self.limits.block_size)

    def _plan_decodes(self, step: StepBuilder) -> list[Sequence]:
        """Add every running sequence that decodes; returns those that are still in their prefill."""
        running, size = self._running, self.limits.block_size
        prefilling: list[Sequence] = []
        index = 0
        while index < len(running):
            sequence = running[index]
            index += 1
            if len(sequence.token_ids) - sequence.num_computed_tokens != 1:
                prefilling.append(sequence)
            elif sequence.num_computed_tokens < len(sequence.block_table) * size or self._grow(sequence):
                step.add_decode(sequence)
        return prefilling

    def _grow(self, sequence: Sequence) -> bool:
        """Take one more block for ``sequence``, preempting the youngest as needed; False when that is itself.

        Whoever is preempted comes after ``sequence`` in the batch, so it is not in the plan yet.
        """
        while self._pool.num_available == 0:
            youngest = self._running[-1]
            self._preempt(youngest)
            if youngest is sequence:
                return False
        self._extend(sequence, 1)
        return True

    def _extend(self, sequence: Sequence, count: int) -> None:
        taken = self._pool.take(count)
        sequence.block_table.extend(taken)
        sequence.block_tags.extend(self._pool.tags_of(taken))

    def _preempt(self, sequence: Sequence) -> None:
        """Give up the blocks of the youngest; it keeps its tokens and starts over when there is room."""
        self._running.remove(sequence)
        self._release(sequence)
        sequence.status = SequenceStatus.WAITING
        self._waiting.appendleft(sequence)
        self.counters.num_preemptions += 1

    def _plan_prefills(self, step: StepBuilder, prefilling: ListOf[Sequence]) -> None:
        """Share the budget out: half of it for the oldest, so that it gets on whatever comes; the rest for
        those who are done soonest, so that a short prompt does not wait for a long one; what is left of that
        for the oldest again.
        """
        if not prefilling or not step.budget:
            return
        oldest, *others = prefilling
        share = min(oldest.num_uncomputed_tokens, -(-step.budget // 2))
        room = step.budget - share
        takers: list[tuple[Sequence, int]] = []
        for sequence in sorted(others, key=lambda other: other.num_uncomputed_tokens):
            if room == 0:
                break
            takers.append((sequence, min(sequence.num_uncomputed_tokens, room)))
            room -= takers[-1][1]
        step.add_prefill(oldest, min(oldest.num_uncomputed_tokens, share + room))
        for sequence, num_tokens in takers:
            step.add_prefill(sequence, num_tokens)

    def _admit(self) -> list[Sequence]:
        """Move sequences from the head of the queue into the batch while there is room; returns them."""
        admitted: list[Sequence] = []
        while self._waiting and len(self._running) < self.limits.max_running:
            sequence = self._waiting[0]
            matched = [] if self._cache is None else self._cache.match(sequence)
            if matched is None:
                break
            num_new = self._blocks_for(sequence.num_tokens) - len(matched)
            # Each running sequence may need a block soon: without this headroom an admission would often be
            # undone by a preemption a few steps later. With an empty batch everything is available.
            room = self._pool.num_available - self._pool.num_cached_among(matched) - len(self._running)
            if num_new > room or self.holds_back(sequence, len(matched)):
                break
            self._waiting.popleft()
            self._start(sequence, matched, num_new)
            admitted.append(sequence)
        return admitted

    def _start(self, sequence: Sequence, matched: list[int], num_new: int) -> None:
        self._pool.share(matched)
        sequence.block_table = list(matched)
        sequence.block_tags = [] if self._cache is None else self._cache.tags_of(sequence, len(matched))
        self._extend(sequence, num_new)
        sequence.num_computed_tokens = len(matched) * self.limits.block_size
        sequence.num_registered_blocks = len(matched)
        sequence.status = SequenceStatus.RUNNING
        if sequence.cached_prompt_tokens is None and (told := sequence.told_cached_tokens) is not None:
            sequence.cached_prompt_tokens = min(told, sequence.num_prompt_tokens - 1)  # looked up elsewhere
        elif sequence.cached_prompt_tokens is None:
            sequence.cached_prompt_tokens = sequence.num_computed_tokens
            self.counters.num_prompt_tokens += sequence.num_prompt_tokens
            self.counters.num_cached_prompt_tokens += sequence.num_computed_tokens
        if self._cache is not None:
            self._cache.claim(sequence)
        self._running.append(sequence)

    def _plan_drafts(self, step: StepBuilder, lookup: PromptLookup) -> None:
        """Let guesses follow the decodes, as far as budget and free blocks are left over: never at the cost
        of anybody's known tokens, nor of what the prefix cache holds.
        """
        for index, (chunk, sequence) in enumerate(zip(step.chunks, step.sequences, strict=True)):
            if not (chunk.needs_logits and chunk.is_decode):
                continue
            num_free = max(self._pool.num_free - len(self._running), 0)
            num_slots = (len(sequence.block_table) + num_free) * self.limits.block_size
            room = min(
                step.budget,
                sequence.sampling.max_tokens - sequence.num_generated_tokens - 1,
                self.limits.max_model_len - sequence.num_tokens - 1,
                num_slots - sequence.num_tokens,
            )
            draft = lookup.propose(sequence, room)
            if draft:
                num_blocks = self._blocks_for(sequence.num_tokens + len(draft)) - len(sequence.block_table)
                self._extend(sequence, max(num_blocks, 0))
                step.add_drafts(index, draft)

    def _settle_drafts(self, sequence: Sequence, chunk: ScheduledChunk) -> None:
        """Enter the guesses that were right, and give back the blocks that the others would have needed."""
        num_known = chunk.start + len(chunk.token_ids) - chunk.num_drafts
        num_right = max(sequence.num_tokens - num_known - 1, 0)
        sequence.num_computed_tokens += num_right
        self.counters.num_draft_tokens += chunk.num_drafts
        self.counters.num_right_draft_tokens += num_right
        if self._lookup is not None:
            self._lookup.observe(sequence, chunk.num_drafts, num_right)
        num_needed = self._blocks_for(sequence.num_tokens)
        self._pool.release(sequence.block_table[num_needed:])
        del sequence.block_table[num_needed:], sequence.block_tags[num_needed:]

    def _end(self, sequence: Sequence, reason: SequenceFinish) -> None:
        if sequence.status is SequenceStatus.RUNNING:
            self._running.remove(sequence)
            self._release(sequence)
        else:
            self._waiting.remove(sequence)
        sequence.status = SequenceStatus.FINISHED
        sequence.finish_reason = reason
        del self._by_id[sequence.sequence_id]
        self._ends.pop(sequence.sequence_id, None)
        if self._lookup is not None:
            self._lookup.forget(sequence.sequence_id)
        self._num_media_bytes -= sequence.num_media_bytes

    def _release(self, sequence: Sequence) -> None:
        if self._cache is not None:
            self._cache.disclaim(sequence)
        self._pool.release(sequence.block_table)
        sequence.block_table, sequence.block_tags = [], []
        sequence.num_computed_tokens = 0
        sequence.num_registered_blocks = 0
