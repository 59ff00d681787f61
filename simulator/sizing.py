"""How many replicas a workload needs for a target."""

from __future__ import annotations

from collections.abc import Callable

import msgspec

from simulator.measures import Results


class Need(msgspec.Struct, frozen=True):
    """``p90`` limits in seconds."""

    ttft_p90_s: float
    tpot_p90_s: float

    def is_met(self, results: Results) -> bool:
        """Whether the run stayed within both limits and refused nothing."""
        return (
            not results.num_refused
            and results.ttft.p90 <= self.ttft_p90_s
            and results.tpot.p90 <= self.tpot_p90_s
        )


class Sizing(msgspec.Struct, frozen=True):
    """``num_replicas`` is the least that meets the need, None when even the most does not; ``runs`` are those
    that were made on the way.
    """

    num_replicas: int | None
    runs: list[Results]


def least_replicas(simulate: Callable[[int], Results], need: Need, max_replicas: int) -> Sizing:
    """Double until the need is met, then halve the gap. ``simulate`` runs the workload on so many replicas.

    Supposes that more replicas never do worse; where that fails by chance the answer errs to the high side.
    """
    runs: list[Results] = []

    def is_enough(count: int) -> bool:
        runs.append(simulate(count))
        return need.is_met(runs[-1])

    low, high = 0, 1
    while not is_enough(high):
        if high >= max_replicas:
            return Sizing(None, runs)
        low, high = high, min(high * 2, max_replicas)
    while high - low > 1:
        middle = (low + high) // 2
        if is_enough(middle):
            high = middle
        else:
            low = middle
    return Sizing(high, runs)
