"""Hit ratios without time, against a plain least-recently-used list and against published tables."""

from __future__ import annotations

import random
from collections import OrderedDict
from pathlib import Path

import pytest

from simulator.cache_replay import CountingPool, replay
from simulator.hit_tables import by_capacity, by_policy
from simulator.policies import make_policies
from simulator.trace import TraceEntry
from tests.support.shared_data import shared_data

TOLERANCE = 0.005


def plain_lru(entries: list[TraceEntry], capacity: int) -> float:
    """Leading-run match on one list, the tail evicted first."""
    kept: OrderedDict[int, None] = OrderedDict()
    hits = total = 0
    for entry in entries:
        run = 0
        while run < len(entry.hash_ids) and entry.hash_ids[run] in kept:
            run += 1
        hits += run
        total += len(entry.hash_ids)
        wanted = entry.hash_ids[:capacity]
        for block in reversed(wanted):
            kept.pop(block, None)
            kept[block] = None
        while len(kept) > capacity:
            kept.popitem(last=False)
    return hits / total


@pytest.mark.parametrize("capacity", [8, 20, 60, 1000])
def test_the_block_pool_counts_as_a_plain_list_does(capacity: int) -> None:
    source = random.Random(capacity)
    entries = []
    for number in range(600):
        session, depth = source.randrange(12), source.randrange(1, 8)
        ids = [session * 100 + block for block in range(depth)]
        entries.append(TraceEntry(number, depth * 512, 1, ids))
    found = replay(entries, (CountingPool("pool", capacity),), make_policies()["round-robin"](), 512)
    assert found.blocks == pytest.approx(plain_lru(entries, capacity), abs=1e-12)
    assert found.imbalance == 1.0


CAPACITIES = [1_000_000, 100_000, 50_000, 30_000, 10_000, 3000, 1000]
BLOCKS = {
    "conversation": [0.366, 0.364, 0.355, 0.326, 0.212, 0.065, 0.045],
    "synthetic": [0.640, 0.640, 0.640, 0.624, 0.424, 0.191, 0.084],
}
TOKENS = {
    "conversation": [0.374, 0.371, 0.362, 0.332, 0.216, 0.067, 0.045],
    "synthetic": [0.651, 0.651, 0.651, 0.636, 0.432, 0.194, 0.086],
}
ROUTING = {
    "conversation": {"round-robin": (0.113, 1.04), "first-block": (0.136, 8.0), "prefix-aware": (0.136, 8.0),
                     "rendezvous": (0.355, 1.10)},
    "synthetic": {"round-robin": (0.194, 1.04), "first-block": (0.640, 1.13), "prefix-aware": (0.640, 1.01),
                  "rendezvous": (0.640, 1.14)},
}  # fmt: skip


def trace(name: str) -> Path:
    return shared_data(f"mooncake/{name}_trace.jsonl")


@pytest.mark.slow
@pytest.mark.parametrize("name", ["conversation", "synthetic"])
def test_hit_ratios_of_public_traces_by_capacity(name: str) -> None:
    rows = by_capacity(trace(name), CAPACITIES)
    assert [row.blocks for row in rows] == pytest.approx(BLOCKS[name], abs=TOLERANCE)
    assert [row.tokens for row in rows] == pytest.approx(TOKENS[name], abs=TOLERANCE)


@pytest.mark.slow
@pytest.mark.parametrize("name", ["conversation", "synthetic"])
def test_hit_ratios_of_public_traces_by_policy(name: str) -> None:
    """A router keyed on the first block, or on the longest prefix, sends one trace to a single replica."""
    for row in by_policy(trace(name), 8, 5859):
        blocks, imbalance = ROUTING[name][row.policy]
        assert row.blocks == pytest.approx(blocks, abs=0.01), row.policy
        assert row.imbalance == pytest.approx(imbalance, abs=0.1), row.policy
