"""Tables of hit ratios of a trace, without a model of time."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import msgspec

from simulator.cache_replay import CountingPool, HitRatios, replay
from simulator.policies import make_policies
from simulator.trace import MOONCAKE_BLOCK_TOKENS, read_trace

POLICIES = ("round-robin", "first-block", "prefix-aware", "rendezvous")


class CapacityRow(msgspec.Struct, frozen=True):
    """One pool of so many blocks."""

    capacity: int
    blocks: float
    tokens: float


class PolicyRow(msgspec.Struct, frozen=True):
    """Several pools; ``imbalance`` is the largest one's uncached tokens over the mean."""

    policy: str
    blocks: float
    tokens: float
    imbalance: float


def by_capacity(trace: Path, capacities: Sequence[int]) -> list[CapacityRow]:
    """One pool of each capacity. Raises TraceError."""
    rows = []
    for capacity in capacities:
        found = _replay(trace, (CountingPool("pool", capacity),), "round-robin")
        rows.append(CapacityRow(capacity, found.blocks, found.tokens))
    return rows


def by_policy(
    trace: Path, num_workers: int, worker_blocks: int, policies: Sequence[str] = POLICIES
) -> list[PolicyRow]:
    """Several pools under each policy. Raises TraceError."""
    rows = []
    for policy in policies:
        pools = tuple(CountingPool(f"replica-{number}", worker_blocks) for number in range(num_workers))
        found = _replay(trace, pools, policy)
        rows.append(PolicyRow(policy, found.blocks, found.tokens, found.imbalance))
    return rows


def _replay(trace: Path, pools: tuple[CountingPool, ...], policy: str) -> HitRatios:
    entries = read_trace(trace, MOONCAKE_BLOCK_TOKENS)
    return replay(entries, pools, make_policies()[policy](), MOONCAKE_BLOCK_TOKENS)
