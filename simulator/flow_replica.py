"""A replica for fleets of thousands: the engine's own block pool and prefix cache, and time in closed form.

Prompts are computed one after the other at the profile's prefill rate; an answer then takes as long as its
tokens do at the batch size it begins with, stretched by the share of time that prefill takes. What that
leaves out (chunks, preemption, a batch that changes under way) is measured by running both models on one
workload: ``embergate simulate check``.
"""

from __future__ import annotations

import heapq
from collections import deque

from backend.engine.block_pool import BlockPool
from backend.engine.messages import SamplingParams, SequenceRequest
from backend.engine.prefix_cache import PrefixCache
from backend.engine.sequence import Sequence
from simulator.replica import leading_cached
from simulator.requests import SimulatedRequest
from simulator.step_time import ReplicaProfile, attended

_UNIT = 1
"""Blocks are counted one by one: a sequence here has one token per block of the workload."""
_LOAD_WINDOW_S = 10.0
_SAMPLING = SamplingParams(max_tokens=1, ignore_eos=True)


class FlowReplica:
    """One replica; the attributes are those of :class:`~simulator.replica.SteppedReplica`."""

    def __init__(
        self, replica_id: str, profile: ReplicaProfile, block_tokens: int, weight: float = 1.0
    ) -> None:
        self.id = replica_id
        self.weight = weight
        self.profile = profile
        self.num_in_flight = 0
        self.load_tokens = 0
        self.is_draining = False
        self.computed_prompt_tokens = 0
        self._block_tokens = block_tokens
        self._cache = PrefixCache(_UNIT)
        self._pool = BlockPool(max(1, profile.kv_tokens // block_tokens), self._cache)
        self._waiting: deque[SimulatedRequest] = deque()
        self._running: dict[int, tuple[SimulatedRequest, Sequence]] = {}
        self._events: list[tuple[float, int, bool]] = []
        self._prefill_free_s = 0.0
        self._prefill_busy_s = 0.0
        self._busy_since_s = 0.0
        self._next_id = 0

    @property
    def wake_s(self) -> float | None:
        """When to :meth:`advance` it; None while it has nothing to do."""
        return self._events[0][0] if self._events else None

    def can_hold(self, request: SimulatedRequest) -> bool:
        """Whether the request could ever run here."""
        return self._num_blocks(request) <= self._pool.num_blocks

    def num_matching(self, request: SimulatedRequest) -> int:
        """Leading blocks of the prompt that are cached here now."""
        return leading_cached(self._cache, request.digests[: self._num_matchable(request)])

    def submit(self, request: SimulatedRequest, now_s: float) -> None:
        """Run a request, or queue it when the batch or the cache is full."""
        self.num_in_flight += 1
        self.load_tokens += request.num_tokens
        self._waiting.append(request)
        self._admit(now_s)

    def advance(self, now_s: float) -> list[SimulatedRequest]:
        """Let what is due happen; the requests that are finished."""
        finished: list[SimulatedRequest] = []
        while self._events and self._events[0][0] <= now_s:
            _, number, is_end = heapq.heappop(self._events)
            request, sequence = self._running[number]
            if not is_end:
                self._give_first_token(number, request, sequence, now_s)
                continue
            request.finished_s = now_s
            self._register(sequence, len(request.digests))
            del self._running[number]
            self._pool.release(sequence.block_table)
            self.num_in_flight -= 1
            self.load_tokens -= request.num_tokens
            finished.append(request)
        self._admit(now_s)
        return finished

    def lose_all(self) -> list[SimulatedRequest]:
        """The replica is gone: the requests that it had."""
        lost = [request for request, _ in self._running.values()] + list(self._waiting)
        self._running.clear()
        self._waiting.clear()
        self._events.clear()
        self.num_in_flight = self.load_tokens = 0
        return lost

    def check_invariants(self) -> None:
        """Raise InvariantError when the books of blocks do not add up."""
        self._pool.check_invariants(sequence.block_table for _, sequence in self._running.values())
        self._cache.check_invariants([])

    def _admit(self, now_s: float) -> None:
        while self._waiting and len(self._running) < self.profile.max_running:
            request = self._waiting[0]
            sequence = self._sequence(request)
            matched = self._cache.match(sequence) or []
            num_new = self._num_blocks(request) - len(matched)
            if num_new > self._pool.num_available - self._pool.num_cached_among(matched):
                break
            self._waiting.popleft()
            self._pool.share(matched)
            sequence.block_table = matched + self._pool.take(num_new)
            sequence.num_registered_blocks = len(matched)
            self._start(request, sequence, len(matched) * self._block_tokens, now_s)

    def _start(self, request: SimulatedRequest, sequence: Sequence, cached_tokens: int, now_s: float) -> None:
        step_time = self.profile.step_time
        begins_s = max(now_s, self._prefill_free_s)
        num_new = request.prompt_tokens - cached_tokens
        takes_s = step_time.step_s(0, num_new, 0, attended(cached_tokens, num_new))
        self._prefill_free_s = begins_s + takes_s
        self._note_prefill(takes_s, now_s)
        self._running[sequence.sequence_id] = request, sequence
        request.cached_tokens = cached_tokens
        self.computed_prompt_tokens += request.prompt_tokens - cached_tokens
        heapq.heappush(self._events, (self._prefill_free_s, sequence.sequence_id, False))

    def _give_first_token(
        self, number: int, request: SimulatedRequest, sequence: Sequence, now_s: float
    ) -> None:
        request.first_token_s = now_s
        self._register(sequence, min(request.prompt_tokens // self._block_tokens, len(request.digests)))
        step_s = self.profile.step_time.step_s(len(self._running), 0, 0)
        share = min(0.9, self._prefill_busy_s / _LOAD_WINDOW_S)
        ends_s = now_s + (request.output_tokens - 1) * step_s / (1.0 - share)
        heapq.heappush(self._events, (ends_s, number, True))

    def _register(self, sequence: Sequence, num_full: int) -> None:
        """So many leading blocks have been computed."""
        sequence.num_computed_tokens = num_full
        self._cache.register_full_blocks(sequence)

    def _note_prefill(self, takes_s: float, now_s: float) -> None:
        """Prefill of the last ten seconds, forgotten evenly: the share of time that decodes do not get."""
        passed = now_s - self._busy_since_s
        self._prefill_busy_s = max(0.0, self._prefill_busy_s * (1.0 - min(1.0, passed / _LOAD_WINDOW_S)))
        self._prefill_busy_s += takes_s
        self._busy_since_s = now_s

    def _num_blocks(self, request: SimulatedRequest) -> int:
        return -(-request.num_tokens // self._block_tokens)

    def _num_matchable(self, request: SimulatedRequest) -> int:
        return min((request.prompt_tokens - 1) // self._block_tokens, len(request.digests))

    def _sequence(self, request: SimulatedRequest) -> Sequence:
        """A sequence of the engine, one token a block, and one more that is left to compute."""
        self._next_id += 1
        number = self._next_id
        sequence = Sequence(
            SequenceRequest(
                sequence_id=number,
                prompt_token_ids=[0] * (self._num_matchable(request) + 1),
                sampling=_SAMPLING,
            )
        )
        sequence.block_hashes = list(request.digests)
        return sequence
