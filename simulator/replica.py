"""A replica, step by step: the engine's own scheduler, block pool and prefix cache, with made-up time."""

from __future__ import annotations

from collections.abc import Iterable
from itertools import takewhile

from backend.engine.block_pool import BlockPool
from backend.engine.limits import SchedulerLimits
from backend.engine.messages import SamplingParams, SequenceRequest
from backend.engine.pace import PrefillPace
from backend.engine.prefix_cache import PrefixCache
from backend.engine.scheduler import Scheduler
from backend.engine.sequence import Sequence
from backend.engine.step_builder import Step
from simulator.host import Host
from simulator.requests import SimulatedRequest
from simulator.step_time import ReplicaProfile, attended

_NO_LIMIT = 1 << 40


class SteppedReplica:
    """One replica. While it has work a step is running, which ends at :attr:`wake_s`.

    Attributes:
        id: its name for routing.
        weight: its share of the keys.
        num_in_flight: requests it has been given and not finished.
        load_tokens: tokens that those still cost, as far as can be told.
        is_draining: gets no new requests.
    """

    def __init__(
        self,
        replica_id: str,
        profile: ReplicaProfile,
        block_tokens: int,
        weight: float = 1.0,
        host: Host | None = None,
    ) -> None:
        """``host``: the machine that it shares with others, if it does."""
        self.id = replica_id
        self.weight = weight
        self.profile = profile
        self.num_in_flight = 0
        self.load_tokens = 0
        self.is_draining = False
        self.computed_prompt_tokens = 0
        self._block_tokens = block_tokens
        self._host = host or Host()
        self._cache = PrefixCache(block_tokens)
        self._pool = BlockPool(max(1, profile.kv_tokens // block_tokens), self._cache)
        self._scheduler = Scheduler(
            SchedulerLimits(
                block_size=block_tokens,
                max_model_len=_NO_LIMIT,
                max_tokens_per_step=max(profile.max_tokens_per_step, profile.max_running),
                max_running=profile.max_running,
                max_waiting=_NO_LIMIT,
            ),
            self._pool,
            self._cache,
        )
        self._pace = PrefillPace(profile.max_mixed_step_s)
        self._requests: dict[int, SimulatedRequest] = {}
        self._step: Step | None = None
        self._step_ends_s = 0.0
        self._next_id = 0

    @property
    def wake_s(self) -> float | None:
        """When to :meth:`advance` it; None while it has nothing to do."""
        return None if self._step is None else self._step_ends_s

    def can_hold(self, request: SimulatedRequest) -> bool:
        """Whether the request could ever run here."""
        return -(-request.num_tokens // self._block_tokens) <= self._pool.num_blocks

    def num_matching(self, request: SimulatedRequest) -> int:
        """Leading blocks of the prompt that are cached here now."""
        return leading_cached(
            self._cache, request.digests[: (request.prompt_tokens - 1) // self._block_tokens]
        )

    def submit(self, request: SimulatedRequest, now_s: float) -> None:
        """Queue a request; it is admitted in the next step."""
        sequence = self._sequence(request)
        self._requests[sequence.sequence_id] = request
        self.num_in_flight += 1
        self.load_tokens += request.num_tokens
        self._scheduler.add(sequence)
        if self._step is None:
            self._begin_step(now_s)

    def advance(self, now_s: float) -> list[SimulatedRequest]:
        """End the step that ends now and begin the next; the requests that are finished."""
        finished = self._end_step(now_s)
        self._begin_step(now_s)
        return finished

    def take_in(self, request: SimulatedRequest) -> None:
        """Hold the KV of the prompt's full blocks, computed elsewhere, as far as there is room for it."""
        sequence = self._sequence(request)
        sequence.num_computed_tokens = request.prompt_tokens // self._block_tokens * self._block_tokens
        matched = self._cache.match(sequence) or []
        self._pool.share(matched)
        wanted = sequence.num_computed_tokens // self._block_tokens - len(matched)
        taken = self._pool.take(min(wanted, self._pool.num_available)) if wanted > 0 else []
        sequence.block_table = matched + taken
        sequence.num_computed_tokens = len(sequence.block_table) * self._block_tokens
        sequence.num_registered_blocks = len(matched)
        self._cache.register_full_blocks(sequence)
        self._pool.release(sequence.block_table)

    def lose_all(self) -> list[SimulatedRequest]:
        """The replica is gone: the requests that it had."""
        lost = list(self._requests.values())
        if self._step is not None:
            self._host.end()
        self._step = None
        self._requests.clear()
        self.num_in_flight = self.load_tokens = 0
        return lost

    def check_invariants(self) -> None:
        """Raise InvariantError when the engine's books do not add up."""
        self._scheduler.check_invariants()

    def _begin_step(self, now_s: float) -> None:
        if not self._scheduler.has_work:
            return
        step = self._step = self._scheduler.plan(self._pace.allowance)
        num_decodes = num_prefill = num_context = 0
        num_attended = 0.0
        for chunk, sequence in zip(step.plan.chunks, step.sequences, strict=True):
            if len(chunk.token_ids) == 1 and sequence.num_generated_tokens:
                num_decodes += 1
                num_context += chunk.start
            else:
                num_prefill += len(chunk.token_ids)
                num_attended += attended(chunk.start, len(chunk.token_ids))
        step_s = self.profile.step_time.step_s(num_decodes, num_prefill, num_context, num_attended)
        step_s *= self._host.begin()
        self._pace.observe(num_decodes, num_prefill, step_s)
        self._step_ends_s = now_s + step_s

    def _end_step(self, now_s: float) -> list[SimulatedRequest]:
        step, self._step = self._step, None
        if step is None:
            return []
        self._host.end()
        self._scheduler.commit(step, [sequence.sequence_id for sequence in step.rows])
        finished: list[SimulatedRequest] = []
        for sequence in step.rows:
            request = self._requests[sequence.sequence_id]
            if request.first_token_s is None:
                request.first_token_s = now_s
                request.cached_tokens = sequence.cached_prompt_tokens or 0
                self.computed_prompt_tokens += request.prompt_tokens - request.cached_tokens
            if sequence.finish_reason is not None:
                request.finished_s = now_s
                self._forget(sequence.sequence_id)
                finished.append(request)
        return finished

    def _forget(self, sequence_id: int) -> None:
        request = self._requests.pop(sequence_id)
        self.num_in_flight -= 1
        self.load_tokens -= request.num_tokens

    def _sequence(self, request: SimulatedRequest) -> Sequence:
        """The engine's sequence. Its hashes are given: a workload already names prefixes. Its tokens are its
        own number, so that what nobody named is shared with nobody.
        """
        self._next_id += 1
        number = self._next_id
        sequence = Sequence(
            SequenceRequest(
                sequence_id=number,
                prompt_token_ids=[number % (1 << 31)] * request.prompt_tokens,
                sampling=SamplingParams(max_tokens=max(1, request.output_tokens), ignore_eos=True),
            )
        )
        sequence.block_hashes = list(request.digests)
        return sequence


def leading_cached(cache: PrefixCache, digests: Iterable[bytes]) -> int:
    """How many blocks of a prompt are cached before the first that is not."""
    return sum(1 for _ in takewhile(cache.holds, digests))
