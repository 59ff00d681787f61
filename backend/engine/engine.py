"""One engine: takes sequences, runs steps, gives tokens. No sockets; the clock is handed in.

:class:`Engine` ties the decisions (:mod:`backend.engine.scheduler`) to the model runner and the sampler. Call
:meth:`Engine.submit` and :meth:`Engine.abort` between steps, :meth:`Engine.step` while there is work, and
collect what came of all three with :meth:`Engine.take_outputs`. A long step can look up from its work, so
that what arrives meanwhile need not wait for its end.
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from collections.abc import Sequence as ListOf
from itertools import accumulate

import msgspec
from torch import Tensor

from backend.config import BackendConfig, TransferConfig
from backend.engine.block_pool import BlockPool
from backend.engine.block_store import BlockStore
from backend.engine.block_tags import BlockTags
from backend.engine.grammars import Compilation, GrammarPool
from backend.engine.kv_size import choose_num_blocks
from backend.engine.limits import RefusedError, SchedulerLimits
from backend.engine.messages import EngineInfo, EngineStats, RefusalCode, SequenceRequest, TokenOutput
from backend.engine.pace import PrefillPace
from backend.engine.prefix_cache import PrefixCache
from backend.engine.request_rules import refuse_invalid
from backend.engine.sampler import Sampled, Sampler
from backend.engine.scheduler import Scheduler
from backend.engine.sequence import Sequence
from backend.engine.speculation import PromptLookup
from backend.engine.step import ScheduledChunk, ShouldStop, StepInterruptedError, StepPlan
from backend.engine.step_builder import Step
from backend.engine.step_runner import StepRunner
from backend.engine.tier_setup import open_tiering
from backend.engine.transfers import Transfers
from backend.engine.watch import Watch
from backend.transfer.exchange import Exchange
from backend.transfer.payload import KvLayout

MAX_FAILURES_IN_A_ROW = 3
"""Sequences that may fail in the model, without one success between, before the engine itself is to blame."""

_RUNNER_ERRORS = (RuntimeError, ValueError, ArithmeticError, LookupError)
_logger = logging.getLogger(__name__)


class Engine:
    """The engine loop's body. Not thread-safe."""

    def __init__(
        self,
        runner: StepRunner,
        config: BackendConfig,
        *,
        clock_s: Callable[[], float],
        draw_seed: Callable[[], int],
        grammars: GrammarPool | None = None,
    ) -> None:
        """Build the decisions and allocate the runner's KV cache.

        Args:
            clock_s: monotonic seconds.
            draw_seed: a fresh seed for each sequence that brings none.
            grammars: of the model; without them sequences that have a grammar are refused.

        Raises:
            ValueError: naming the setting that cannot work.
        """
        model, cache, limits = runner.info, config.cache, config.scheduler
        max_model_len = min(config.model.max_model_len, model.max_model_len)
        num_blocks = choose_num_blocks(
            cache, model.kv_bytes_per_token, max_model_len, model.kv_memory_bytes, model.memory_bytes
        )
        self._limits = SchedulerLimits.of(cache.block_size, max_model_len, limits)
        self.info = EngineInfo(
            max_model_len=max_model_len,
            vocab_size=model.vocab_size,
            eos_token_ids=tuple(model.eos_token_ids),
            block_size=cache.block_size,
            num_blocks=num_blocks,
            kv_bytes_per_token=model.kv_bytes_per_token,
            device=str(model.device),
            max_running=limits.max_running,
            max_waiting=limits.max_waiting,
            has_vision=model.has_vision,
        )
        runner.allocate_kv(num_blocks, cache.block_size)
        self._runner = runner
        self._max_queue_wait_s = limits.max_queue_wait_s
        self._clock_s = clock_s
        self._cache = PrefixCache(cache.block_size) if cache.enable_prefix_cache else None
        self._pool = BlockPool(num_blocks, self._cache)
        self._tags = BlockTags(num_blocks, cache.block_size)
        kv = runner.kv_blocks
        self.store = (
            None if kv is None or not self._cache else BlockStore(self._pool, self._cache, self._tags, kv)
        )
        """Blocks in and out besides steps; None where that cannot be."""
        self.transfers: Transfers | None = None
        guesses = config.speculation
        lookup = PromptLookup(guesses.max_draft_tokens, guesses.match_tokens) if guesses.enabled else None
        self._scheduler = Scheduler(self._limits, self._pool, self._cache, lookup)
        self.tiering = open_tiering(config, kv, self.store, self._tags, self._scheduler, clock_s)
        self._sampler = Sampler(draw_seed, grammars)
        self._has_grammars = grammars is not None
        self._pace = PrefillPace(limits.max_mixed_step_s)
        self._outputs: list[TokenOutput] = []
        self._num_requests = self._num_aborts = self._num_refusals = self._num_steps = 0
        self._num_mismatches = 0
        self._num_failures_in_a_row = 0
        self._busy_s = 0.0

    @property
    def has_work(self) -> bool:
        """Whether a sequence is running or waiting."""
        return self._scheduler.has_work

    def connect(self, make_exchange: Callable[[KvLayout], Exchange], config: TransferConfig) -> None:
        """Let blocks leave and enter from now on; call once, before the first sequence.

        Raises:
            ValueError: this engine's blocks cannot leave it.
        """
        if self.store is None:
            raise ValueError(
                "role, transfer: blocks cannot leave a replica of several ranks or without a prefix cache"
            )
        exchange = make_exchange(self.store.layout)
        self.transfers = Transfers(self.store, exchange, config, self._clock_s)
        self.info = msgspec.structs.replace(self.info, exchange=exchange.info)

    def prepare(self, request: SequenceRequest) -> Compilation | None:
        """Begin with what a sequence needs beside its steps: its grammar, compiled in a thread.

        None when there is nothing to wait for. A sequence that is submitted before it is done may hold up a
        step of all others.
        """
        return self._sampler.expect(request)

    def submit(self, request: SequenceRequest) -> None:
        """Queue a sequence, or put out its refusal."""
        self._num_requests += 1
        try:
            refuse_invalid(request, self.info.vocab_size, has_grammars=self._has_grammars)
            if request.media and not self.info.has_vision:
                raise RefusedError("invalid_request", "media: this model takes text only")
            sequence = Sequence(request, eos_token_ids=self.info.eos_token_ids, arrived_at_s=self._clock_s())
            self._scheduler.add(sequence, reject_if_busy=request.reject_if_busy)
            if self.transfers is not None:
                self.transfers.expect(request, sequence)
            self._sampler.expect(request)
        except RefusedError as refusal:
            self._put_refusal(request.sequence_id, refusal.code, refusal.message)

    def abort(self, sequence_id: int) -> None:
        """End a sequence and free its blocks now; does nothing for one that is over or unknown."""
        sequence = self._scheduler.finish(sequence_id, "abort")
        if sequence is not None:
            self._num_aborts += 1
            self._sampler.forget(sequence_id)
            self._put(sequence)

    def step(self, look_up: Callable[[], None] | None = None) -> None:
        """Compute one step of whatever there is to do.

        Args:
            look_up: called several times while prompts are computed. It may use every method but this one:
                an abort frees the sequence's blocks at once, while the step goes on for the others, and is
                given up when there are none. (The step may still write to what was freed; no other step can,
                before this one has ended.) What it raises comes out of here.
        """
        started_at_s = self._clock_s()
        self._expire(started_at_s)
        if self.tiering is not None:
            self.tiering.advance()
        if not self._scheduler.has_work:
            return
        step = self._without_mismatches(self._scheduler.plan(self._pace.allowance))
        if not step.sequences:
            return
        for sequence in step.sequences:
            if sequence.queue_wait_s is None:
                sequence.queue_wait_s = started_at_s - sequence.arrived_at_s
        watch = None
        if look_up is not None and step.plan.num_tokens > len(step.plan.chunks):
            watch = Watch(step.sequences, look_up)
        try:
            taken = self._compute(step, None if watch is None else watch.should_stop)
        except StepInterruptedError:
            self._busy_s += self._clock_s() - started_at_s
            if watch is not None and watch.failure is not None:
                raise watch.failure from None
            return
        self._scheduler.settle(step)
        for sequence, own in zip(step.rows, taken, strict=True):
            self._put_tokens(sequence, own)
        self._num_steps += 1
        step_s = self._clock_s() - started_at_s
        decodes = [chunk for chunk in step.plan.chunks if chunk.is_decode]
        num_prefill_tokens = step.plan.num_tokens - sum(len(chunk.token_ids) for chunk in decodes)
        self._pace.observe(len(decodes), num_prefill_tokens, step_s)
        if self.tiering is not None and not decodes:
            self.tiering.rule.observe_prefill(num_prefill_tokens, step_s)
        self._busy_s += step_s

    def take_outputs(self) -> list[TokenOutput]:
        """What happened since the last call, in order."""
        outputs, self._outputs = self._outputs, []
        return outputs

    def stats(self) -> EngineStats:
        """Gauges as of now and counters since the start."""
        counters, pool = self._scheduler.counters, self._pool
        return EngineStats(
            num_running=self._scheduler.num_running,
            num_waiting=self._scheduler.num_waiting,
            num_blocks=pool.num_blocks,
            num_free_blocks=pool.num_free,
            num_cached_blocks=pool.num_cached,
            prompt_tokens=counters.num_prompt_tokens,
            cached_prompt_tokens=counters.num_cached_prompt_tokens,
            completion_tokens=counters.num_completion_tokens,
            computed_tokens=counters.num_computed_tokens,
            num_preemptions=counters.num_preemptions,
            num_draft_tokens=counters.num_draft_tokens,
            num_right_draft_tokens=counters.num_right_draft_tokens,
            num_requests=self._num_requests,
            num_aborts=self._num_aborts,
            num_refusals=self._num_refusals,
            num_evictions=0 if self._cache is None else self._cache.num_evictions,
            num_steps=self._num_steps,
            num_kv_mismatches=self._num_mismatches,
            num_blocks_exported=0 if self.transfers is None else self.transfers.num_blocks_exported,
            num_blocks_imported=0 if self.transfers is None else self.transfers.num_blocks_imported,
            num_held_blocks=0 if self.store is None else self.store.num_held,
            busy_s=self._busy_s,
            tiers=None if self.tiering is None else self.tiering.stats(),
        )

    def check_invariants(self) -> None:
        """Raise InvariantError when the books do not add up. O(blocks); for idle moments and tests."""
        self._scheduler.check_invariants(() if self.store is None else self.store.tables())

    def _expire(self, now_s: float) -> None:
        if self._scheduler.num_waiting == 0:
            return
        for sequence in self._scheduler.expire(now_s - self._max_queue_wait_s):
            self._put_refusal(
                sequence.sequence_id,
                "queue_timeout",
                f"no place in the batch became free within {self._max_queue_wait_s:g} s",
            )

    def _without_mismatches(self, step: Step) -> Step:
        """The step without those whose blocks hold anything but what they put there; they fail."""
        indices = self._tags.find_mismatches(step.plan.chunks)
        for index in indices:
            sequence, places = step.sequences[index], self._tags.mismatched_places(step.plan.chunks[index])
            _logger.critical("KV blocks of sequence %d hold something else", sequence.sequence_id)
            self._num_mismatches += 1
            self._scheduler.condemn(sequence, places)
            self._sampler.forget(sequence.sequence_id)
            self._put(sequence, "a KV block held something else, and nothing was computed from it")
        return step.without(indices) if indices else step

    def _compute(self, step: Step, should_stop: ShouldStop | None) -> list[list[Sampled]]:
        """Run the model and sample; the tokens that each of ``step.rows`` got, none for those that have ended
        meanwhile. Sequences that make the model fail are ended here.
        """
        try:
            logits = self._runner.execute(step.plan, should_stop)
        except _RUNNER_ERRORS as error:
            _logger.error("a step of %d sequences failed: %s", len(step.sequences), type(error).__name__)
            return self._compute_one_by_one(step, should_stop)
        self._num_failures_in_a_row = 0
        wanting = [chunk for chunk in step.plan.chunks if chunk.needs_logits]
        return self._sample(logits, step.rows, wanting)

    def _sample(
        self, logits: Tensor, sequences: ListOf[Sequence], chunks: ListOf[ScheduledChunk]
    ) -> list[list[Sampled]]:
        """Choose tokens and have the scheduler accept them; those that each sequence got.

        ``chunks`` are the sequences' own, in order, with ``num_rows`` rows of ``logits`` each. The row behind
        a guess counts only when the guess is what was chosen before it; so every token is chosen as if it had
        been computed alone, from the sequence's own stream of random numbers.
        """
        first_rows = [0, *accumulate(chunk.num_rows for chunk in chunks)]
        taken: list[list[Sampled]] = [[] for _ in sequences]
        open_rows = [index for index, sequence in enumerate(sequences) if sequence.finish_reason is None]
        depth = 0
        while open_rows:
            if len(open_rows) < len(logits):
                chosen = logits[[first_rows[index] + depth for index in open_rows]]
            else:
                chosen = logits
            results = self._sampler.sample(chosen, [sequences[index] for index in open_rows])
            going_on = []
            for index, result in zip(open_rows, results, strict=True):
                if self._take(sequences[index], result, taken[index], chunks[index], depth):
                    going_on.append(index)
            open_rows, depth = going_on, depth + 1
        return taken

    def _take(
        self, sequence: Sequence, result: Sampled, taken: list[Sampled], chunk: ScheduledChunk, depth: int
    ) -> bool:
        """Accept what was chosen at ``depth`` behind a chunk's known tokens; whether the next row counts."""
        if not result.is_usable:
            self._put_tokens(sequence, taken)
            taken.clear()
            self._fail(sequence, result.problem)
            return False
        taken.append(result)
        goes_on = self._scheduler.accept(sequence, result.token_id, is_last=result.is_last)
        if not goes_on or depth >= chunk.num_drafts:
            return False
        return chunk.token_ids[len(chunk.token_ids) - chunk.num_drafts + depth] == result.token_id

    def _compute_one_by_one(self, step: Step, should_stop: ShouldStop | None) -> list[list[Sampled]]:
        """Run each chunk of a failed step alone, so that only the sequences that are at fault fail.

        Computing a chunk twice is harmless: it writes the same KV to the same slots.
        """
        taken: list[list[Sampled]] = []
        for chunk, sequence in zip(step.plan.chunks, step.sequences, strict=True):
            own: list[Sampled] = []
            if sequence.finish_reason is None:
                own = self._compute_alone(chunk, sequence, should_stop)
            if chunk.needs_logits:
                taken.append(own)
        return taken

    def _compute_alone(
        self, chunk: ScheduledChunk, sequence: Sequence, should_stop: ShouldStop | None
    ) -> list[Sampled]:
        try:
            logits = self._runner.execute(StepPlan((chunk,)), should_stop)
        except _RUNNER_ERRORS:
            self._num_failures_in_a_row += 1
            if self._num_failures_in_a_row >= MAX_FAILURES_IN_A_ROW:
                raise
            self._fail(sequence, "the model failed on this sequence")
            return []
        self._num_failures_in_a_row = 0
        return self._sample(logits, [sequence], [chunk])[0] if chunk.needs_logits else []

    def _fail(self, sequence: Sequence, message: str) -> None:
        if self._scheduler.finish(sequence.sequence_id, "error") is None:
            return  # it was aborted while the model was at it
        self._sampler.forget(sequence.sequence_id)
        self._put(sequence, message)

    def _put_tokens(self, sequence: Sequence, taken: ListOf[Sampled]) -> None:
        if not taken:
            return  # its end was put out already, or it goes on without new ones
        if sequence.finish_reason is not None:
            self._sampler.forget(sequence.sequence_id)
        last = taken[-1]
        is_first = sequence.num_generated_tokens == len(taken)
        self._outputs.append(
            TokenOutput(
                sequence_id=sequence.sequence_id,
                token_ids=[row.token_id for row in taken],
                finish_reason=sequence.finish_reason,
                is_last_text=last.is_last and last.token_id not in sequence.stop_token_ids,
                cached_prompt_tokens=sequence.cached_prompt_tokens or 0,
                logprobs=None if last.logprobs is None else [row.logprobs for row in taken if row.logprobs],
                queue_wait_s=sequence.queue_wait_s or 0.0,
                cached_head=self._cached_head(sequence) if is_first else b"",
            )
        )

    def _cached_head(self, sequence: Sequence) -> bytes:
        """The digest of the last block that the prompt was served from; empty when there was none."""
        num_blocks = (sequence.cached_prompt_tokens or 0) // self.info.block_size
        return sequence.block_hashes[num_blocks - 1] if num_blocks else b""

    def _put(self, sequence: Sequence, message: str = "") -> None:
        """Put out the end of a sequence that brings no token."""
        self._outputs.append(
            TokenOutput(
                sequence_id=sequence.sequence_id,
                finish_reason=sequence.finish_reason,
                cached_prompt_tokens=sequence.cached_prompt_tokens or 0,
                queue_wait_s=sequence.queue_wait_s or 0.0,
                message=message,
                cached_head=self._cached_head(sequence),
            )
        )

    def _put_refusal(self, sequence_id: int, code: RefusalCode, message: str) -> None:
        self._num_refusals += 1
        self._outputs.append(
            TokenOutput(sequence_id=sequence_id, finish_reason="error", refusal=code, message=message)
        )
