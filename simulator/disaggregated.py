"""Prefill and decode apart: a group of replicas of which some only compute prompts, the rest only answers.

A prompt goes to the prefill replica that owns its key, its KV then over a link to the decode replica with the
fewest tokens in flight, where the answer goes on. Compare a group of P and D replicas with P + D undivided
ones.
"""

from __future__ import annotations

import heapq
from dataclasses import dataclass

from gateway.routing import RendezvousRanking
from simulator.replica import SteppedReplica
from simulator.requests import SimulatedRequest
from simulator.step_time import ReplicaProfile


@dataclass(frozen=True, slots=True)
class Split:
    """``num_prefill`` and ``num_decode`` replicas a group; the link moves ``link_bytes_per_s`` of KV."""

    num_prefill: int
    num_decode: int
    link_bytes_per_s: float = 40e9

    def __post_init__(self) -> None:
        if self.num_prefill < 1 or self.num_decode < 1:
            raise ValueError(
                "a split needs a prefill and a decode replica at least, "
                f"not {self.num_prefill}+{self.num_decode}"
            )
        if self.link_bytes_per_s <= 0:
            raise ValueError(f"link_bytes_per_s: must be positive, not {self.link_bytes_per_s}")

    @property
    def num_replicas(self) -> int:
        return self.num_prefill + self.num_decode


class DisaggregatedGroup:
    """To the fleet one replica; the attributes are those of :class:`~simulator.replica.SteppedReplica`."""

    def __init__(
        self, group_id: str, profile: ReplicaProfile, block_tokens: int, split: Split, weight: float = 1.0
    ) -> None:
        self.id = group_id
        self.weight = weight
        self.is_draining = False
        self.num_in_flight = 0
        self.load_tokens = 0
        self._link_s_per_token = profile.kv_bytes_per_token / split.link_bytes_per_s
        self._prefill = tuple(
            SteppedReplica(f"{group_id}/prefill-{number}", profile, block_tokens)
            for number in range(split.num_prefill)
        )
        self._decode = tuple(
            SteppedReplica(f"{group_id}/decode-{number}", profile, block_tokens)
            for number in range(split.num_decode)
        )
        self._ranking = RendezvousRanking()
        self._whole: dict[int, SimulatedRequest] = {}
        self._in_transit: list[tuple[float, int, SimulatedRequest]] = []

    @property
    def computed_prompt_tokens(self) -> int:
        """Prompt tokens that prefill replicas computed; what decode replicas make up for is not counted."""
        return sum(replica.computed_prompt_tokens for replica in self._prefill)

    @property
    def wake_s(self) -> float | None:
        """When to :meth:`advance` it; None while it has nothing to do."""
        due = [replica.wake_s for replica in (*self._prefill, *self._decode)]
        due.append(self._in_transit[0][0] if self._in_transit else None)
        return min((at_s for at_s in due if at_s is not None), default=None)

    def can_hold(self, request: SimulatedRequest) -> bool:
        """Whether the request could ever run here."""
        return self._decode[0].can_hold(request)

    def num_matching(self, request: SimulatedRequest) -> int:
        """Leading blocks of the prompt that a prefill replica has cached now."""
        return max(replica.num_matching(request) for replica in self._prefill)

    def submit(self, request: SimulatedRequest, now_s: float) -> None:
        """Let the prompt be computed."""
        self.num_in_flight += 1
        self.load_tokens += request.num_tokens
        self._whole[request.index] = request
        owner = self._ranking(request.account, request.key, self._prefill)[0]
        owner.submit(_leg(request, request.prompt_tokens, 1, now_s), now_s)

    def advance(self, now_s: float) -> list[SimulatedRequest]:
        """Let what is due happen; the requests that are finished."""
        finished: list[SimulatedRequest] = []
        for replica in self._prefill:
            if replica.wake_s is not None and replica.wake_s <= now_s:
                finished += self._hand_over(replica.advance(now_s), now_s)
        while self._in_transit and self._in_transit[0][0] <= now_s:
            self._receive(heapq.heappop(self._in_transit)[2], now_s)
        for replica in self._decode:
            if replica.wake_s is not None and replica.wake_s <= now_s:
                finished += [self._end(leg, now_s) for leg in replica.advance(now_s)]
        return finished

    def lose_all(self) -> list[SimulatedRequest]:
        """The group is gone: the requests that it had."""
        lost = list(self._whole.values())
        for replica in (*self._prefill, *self._decode):
            replica.lose_all()
        self._whole.clear()
        self._in_transit.clear()
        self.num_in_flight = self.load_tokens = 0
        return lost

    def check_invariants(self) -> None:
        """Raise InvariantError when the engine's books do not add up."""
        for replica in (*self._prefill, *self._decode):
            replica.check_invariants()

    def _hand_over(self, legs: list[SimulatedRequest], now_s: float) -> list[SimulatedRequest]:
        """Send the KV of computed prompts on; an answer of one token is already finished."""
        finished: list[SimulatedRequest] = []
        for leg in legs:
            request = self._whole[leg.index]
            request.first_token_s, request.cached_tokens = now_s, leg.cached_tokens
            if request.output_tokens == 1:
                finished.append(self._end(leg, now_s))
                continue
            arrives_s = now_s + leg.prompt_tokens * self._link_s_per_token
            heapq.heappush(self._in_transit, (arrives_s, leg.index, request))
        return finished

    def _receive(self, request: SimulatedRequest, now_s: float) -> None:
        leg = _leg(request, request.prompt_tokens + 1, request.output_tokens - 1, now_s)
        replica = min(self._decode, key=lambda each: (each.load_tokens, each.id))
        replica.take_in(leg)
        replica.submit(leg, now_s)

    def _end(self, leg: SimulatedRequest, now_s: float) -> SimulatedRequest:
        request = self._whole.pop(leg.index)
        request.finished_s = now_s
        self.num_in_flight -= 1
        self.load_tokens -= request.num_tokens
        return request


def _leg(request: SimulatedRequest, prompt: int, output: int, now_s: float) -> SimulatedRequest:
    return SimulatedRequest(
        index=request.index,
        arrival_s=now_s,
        account=request.account,
        key=request.key,
        digests=request.digests,
        prompt_tokens=prompt,
        output_tokens=output,
    )
