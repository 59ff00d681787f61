"""What routing costs by the size of the pool, and what moves when the pool changes."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import msgspec

from gateway.routing import RendezvousRanking, RingRanking

_NUM_KEYS = 300
_MAX_S = 2.0
"""A ranking is measured for so long at most: a ring of thousands takes a while for each key."""


@dataclass(frozen=True)
class Named:
    """A candidate that is nothing but a name."""

    id: str
    weight: float = 1.0


class RoutingCost(msgspec.Struct, frozen=True):
    """Microseconds of CPU to rank all replicas for one key (median of keys)."""

    num_replicas: int
    rendezvous_us: float
    ring_us: float


class Movement(msgspec.Struct, frozen=True):
    """Shares of sessions that have another owner after the pool grew by one and after it shrank again."""

    num_replicas: int
    num_sessions: int
    moved_by_growth: float
    moved_to_others_than_the_newcomer: int
    still_moved_after_shrinking: int


def routing_cost(num_replicas: int, clock: Callable[[], float] = time.thread_time) -> RoutingCost:
    """Measure both rankings of the gateway."""
    pool = tuple(Named(f"replica-{number}") for number in range(num_replicas))
    return RoutingCost(
        num_replicas, _median_us(RendezvousRanking(), pool, clock), _median_us(RingRanking(), pool, clock)
    )


def movement(num_replicas: int, num_sessions: int) -> Movement:
    """Who moves when ``num_replicas`` become one more, and one fewer again."""
    ranking = RendezvousRanking()
    small = tuple(Named(f"replica-{number}") for number in range(num_replicas))
    newcomer = Named(f"replica-{num_replicas}")

    def owners(pool: Sequence[Named]) -> list[str]:
        return [ranking("account", f"ses_{number}", pool)[0].id for number in range(num_sessions)]

    before, after, again = owners(small), owners((*small, newcomer)), owners(small)
    moved = [new for old, new in zip(before, after, strict=True) if old != new]
    return Movement(
        num_replicas,
        num_sessions,
        len(moved) / num_sessions,
        sum(new != newcomer.id for new in moved),
        sum(old != new for old, new in zip(before, again, strict=True)),
    )


def _median_us(
    ranking: Callable[[str, str, Sequence[Named]], list[Named]],
    pool: Sequence[Named],
    clock: Callable[[], float],
) -> float:
    ranking("account", "warm-up", pool)
    times: list[float] = []
    for number in range(_NUM_KEYS):
        started = clock()
        ranking("account", f"ses_{number}", pool)
        times.append(clock() - started)
        if sum(times) > _MAX_S:
            break
    return sorted(times)[len(times) // 2] * 1e6
