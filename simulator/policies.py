"""Who gets a request. Rendezvous hashing and the ring are the gateway's own; the rest is what others do."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Protocol

from gateway.routing import RendezvousRanking, RingRanking
from simulator.requests import SimulatedRequest

_MAX_REMEMBERED = 200_000
_NUM_REMEMBERED_RANKS = 3


class Routable(Protocol):
    """A replica as policies see it."""

    @property
    def id(self) -> str: ...
    @property
    def weight(self) -> float: ...
    @property
    def num_in_flight(self) -> int: ...
    @property
    def load_tokens(self) -> int: ...
    def num_matching(self, request: SimulatedRequest) -> int: ...


Policy = Callable[[SimulatedRequest, Sequence[Routable]], Iterable[Routable]]
"""(request, replicas that may be used) -> replicas, the best first. The pool is a tuple that is replaced when
it changes."""


class Rendezvous:
    """The gateway's: by the affinity key, failing over in rank. Remembers the first ranks of recent keys."""

    def __init__(self, key_of: Callable[[SimulatedRequest], str] = lambda request: request.key) -> None:
        self._ranking = RendezvousRanking()
        self._key_of = key_of
        self._pool: Sequence[Routable] = ()
        self._known: dict[tuple[str, str], list[Routable]] = {}

    def __call__(self, request: SimulatedRequest, replicas: Sequence[Routable]) -> Iterator[Routable]:
        if replicas is not self._pool:
            self._pool = replicas
            self._known.clear()
        name = request.account, self._key_of(request)
        first = self._known.get(name)
        if first is None:
            if len(self._known) >= _MAX_REMEMBERED:
                self._known.clear()
            first = self._known[name] = self._ranking(*name, replicas)[:_NUM_REMEMBERED_RANKS]
        yield from first
        yield from self._ranking(*name, replicas)[len(first) :]


def rendezvous_on_first_block(request: SimulatedRequest) -> str:
    """The wrong key: everyone with the same system prompt has the same first block."""
    return request.first_block


class Ring:
    """The gateway's consistent-hash ring."""

    def __init__(self) -> None:
        self._ranking = RingRanking()

    def __call__(self, request: SimulatedRequest, replicas: Sequence[Routable]) -> list[Routable]:
        return self._ranking(request.account, request.key, replicas)


class RoundRobin:
    """One after the other, whatever is cached where."""

    def __init__(self) -> None:
        self._turn = 0

    def __call__(self, request: SimulatedRequest, replicas: Sequence[Routable]) -> list[Routable]:
        self._turn += 1
        start = self._turn % len(replicas)
        return [*replicas[start:], *replicas[:start]]


def least_loaded(request: SimulatedRequest, replicas: Sequence[Routable]) -> list[Routable]:
    """By tokens in flight, then by name."""
    return sorted(replicas, key=lambda replica: (replica.load_tokens, replica.id))


def prefix_aware(request: SimulatedRequest, replicas: Sequence[Routable]) -> list[Routable]:
    """By the longest prefix that is cached there now, then by tokens in flight: what cache-aware routers do.
    Needs to know every replica's cache, and sends everything that begins alike to one place.
    """
    return sorted(
        replicas, key=lambda replica: (-replica.num_matching(request), replica.load_tokens, replica.id)
    )


class BoundedLoad:
    """Rendezvous, but no replica gets more than ``factor`` times the mean of requests in flight.

    Consistent hashing with bounded loads: Mirrokni, Thorup, Zadimoghaddam, 2018.
    """

    def __init__(self, factor: float = 1.25) -> None:
        self._rendezvous = Rendezvous()
        self._factor = factor

    def __call__(self, request: SimulatedRequest, replicas: Sequence[Routable]) -> Iterator[Routable]:
        total = sum(replica.num_in_flight for replica in replicas) + 1
        bound = self._factor * total / len(replicas)
        passed_over: list[Routable] = []
        for replica in self._rendezvous(request, replicas):
            if replica.num_in_flight + 1 <= max(1.0, bound):
                yield replica
            else:
                passed_over.append(replica)
        yield from passed_over


def make_policies() -> dict[str, Callable[[], Policy]]:
    """All policies by the name they have on the command line; each call of one makes a fresh one."""
    return {
        "rendezvous": Rendezvous,
        "ring": Ring,
        "bounded-load": BoundedLoad,
        "least-loaded": lambda: least_loaded,
        "prefix-aware": lambda: prefix_aware,
        "round-robin": RoundRobin,
        "first-block": lambda: Rendezvous(rendezvous_on_first_block),
    }
