"""Ranking of replicas: stable, balanced, minimal in what it moves."""

from __future__ import annotations

from collections import Counter
from typing import Any, NamedTuple

import pytest
from hypothesis import given
from hypothesis import strategies as st

from gateway.framing import framed
from gateway.routing import Ranking, RendezvousRanking, RingRanking, _Pool, derived_key

NUM_SESSIONS = 2000


class Node(NamedTuple):
    id: str
    weight: float = 1.0


def nodes(count: int) -> list[Node]:
    return [Node(f"replica-{index}") for index in range(count)]


def owners(ranking: Ranking[Node], members: list[Node], num_sessions: int = NUM_SESSIONS) -> list[str]:
    return [ranking("account", f"ses_{session}", members)[0].id for session in range(num_sessions)]


@pytest.mark.slow
@given(
    ids=st.lists(st.text(min_size=1), min_size=1, max_size=8, unique=True),
    account=st.text(),
    key=st.text(),
    random=st.randoms(),
)
def test_a_ranking_is_a_permutation_that_does_not_depend_on_the_order_of_the_pool(
    ids: list[str], account: str, key: str, random: Any
) -> None:
    """BR-38: every gateway process computes the same."""
    members = [Node(node_id) for node_id in ids]
    ranked = RendezvousRanking()(account, key, members)
    assert sorted(ranked) == sorted(members)
    random.shuffle(members)
    assert RendezvousRanking()(account, key, members) == ranked


@given(count=st.integers(2, 8), gone=st.integers(0, 7), session=st.integers(0, 10_000))
def test_the_ranking_is_the_failover_order(count: int, gone: int, session: int) -> None:
    """Without one replica the rest keep their order, so only the sessions of the lost one move."""
    members = nodes(count)
    ranked = RendezvousRanking()("account", f"ses_{session}", members)
    lost = members[gone % count]
    rest = [member for member in members if member is not lost]
    expected = [member for member in ranked if member is not lost]
    assert RendezvousRanking()("account", f"ses_{session}", rest) == expected


@pytest.mark.parametrize("count", [2, 3, 8])
def test_a_new_replica_takes_its_share_and_nothing_else_moves(count: int) -> None:
    """BR-36: about 1/(N+1) of the sessions move, all of them to the newcomer; removing it puts them back."""
    members = nodes(count)
    newcomer = Node("replica-new")
    before = owners(RendezvousRanking(), members)
    after = owners(RendezvousRanking(), [*members, newcomer])
    moved = [(old, new) for old, new in zip(before, after, strict=True) if old != new]
    assert {new for _, new in moved} == {newcomer.id}
    share = len(moved) / NUM_SESSIONS
    assert abs(share - 1 / (count + 1)) < 0.03
    assert owners(RendezvousRanking(), members) == before


@pytest.mark.parametrize("count", [2, 4, 16])
def test_load_is_balanced(count: int) -> None:
    loads = Counter(owners(RendezvousRanking(), nodes(count), 8000))
    assert len(loads) == count
    assert max(loads.values()) / (8000 / count) < 1.15


def test_weights_are_shares() -> None:
    members = [Node("a", 1.0), Node("b", 2.0), Node("c", 5.0)]
    loads = Counter(owners(RendezvousRanking(), members, 16_000))
    for member in members:
        assert abs(loads[member.id] / 16_000 - member.weight / 8) < 0.015


def test_a_changed_weight_moves_sessions_only_to_or_from_that_replica() -> None:
    before = owners(RendezvousRanking(), [Node("a"), Node("b"), Node("c")])
    after = owners(RendezvousRanking(), [Node("a"), Node("b"), Node("c", 2.0)])
    moved = [(old, new) for old, new in zip(before, after, strict=True) if old != new]
    assert moved
    assert {new for _, new in moved} == {"c"}


@pytest.mark.parametrize("count", [1, 31, 32, 200])
def test_a_pool_is_ranked_alike_one_by_one_and_as_an_array(count: int) -> None:
    """So that a pool may grow past the point from which arrays pay without moving a session."""
    members = [Node(f"replica-{index}", 0.5 + index % 3) for index in range(count)]
    pool = _Pool(members)
    for key_hash in range(0, 2**64, 2**64 // 200):
        assert pool.rank_few(key_hash) == pool.rank_many(key_hash)


@pytest.mark.slow
def test_a_large_pool_is_balanced_and_moves_little() -> None:
    members = nodes(64)
    before = owners(RendezvousRanking(), members, 20_000)
    assert max(Counter(before).values()) / (20_000 / 64) < 1.25
    after = owners(RendezvousRanking(), [*members, Node("replica-64")], 20_000)
    moved = [new for old, new in zip(before, after, strict=True) if old != new]
    assert set(moved) == {"replica-64"}
    assert abs(len(moved) / 20_000 - 1 / 65) < 0.1 / 65


def test_pools_that_are_gone_are_forgotten() -> None:
    ranking = RendezvousRanking()
    for count in range(1, 200):
        assert len(ranking("account", "key", nodes(count))) == count


def test_accounts_are_ranked_apart() -> None:
    members = nodes(8)
    same = sum(
        RendezvousRanking()("one", f"ses_{index}", members)[0]
        == RendezvousRanking()("two", f"ses_{index}", members)[0]
        for index in range(1000)
    )
    assert 60 < same < 200


def test_framing_keeps_account_and_key_apart() -> None:
    assert framed(b"org_1", b"2345") != framed(b"org_12345", b"")
    assert framed(b"a", b"") != framed(b"a")


def test_the_ring_is_stable_complete_and_minimal_too() -> None:
    ring: Ranking[Node] = RingRanking()
    members = nodes(4)
    before = owners(ring, members)
    assert before == owners(RingRanking(), members)
    assert len(set(before)) == 4
    for session in range(50):
        assert sorted(ring("account", f"ses_{session}", members)) == members
    after = owners(ring, members[:3])
    assert all(old == new for old, new in zip(before, after, strict=True) if old != "replica-3")


def test_the_ring_knows_weights() -> None:
    loads = Counter(owners(RingRanking(), [Node("a", 1.0), Node("b", 3.0)]))
    assert 2 < loads["b"] / loads["a"] < 4.5


SYSTEM = {"role": "system", "content": "be brief"}
FIRST = {"role": "user", "content": "first"}


def test_later_turns_have_the_same_derived_key() -> None:
    first = derived_key([SYSTEM, FIRST], None)
    later = [SYSTEM, FIRST, {"role": "assistant", "content": "a"}, {"role": "user", "content": "second"}]
    assert derived_key(later, None) == first


@pytest.mark.parametrize(
    "messages",
    [
        [FIRST],
        [SYSTEM, {"role": "user", "content": "other"}],
        [{"role": "system", "content": "be long"}, FIRST],
        [{"role": "system", "content": "be brieffirst"}, {"role": "user", "content": ""}],
        [{"role": "system", "content": [{"type": "text", "text": "be brief"}]}, FIRST],
    ],
)
def test_other_prefixes_have_other_derived_keys(messages: list[dict[str, Any]]) -> None:
    assert derived_key(messages, None) != derived_key([SYSTEM, FIRST], None)


def test_tools_are_part_of_the_derived_key() -> None:
    tools = [{"type": "function", "function": {"name": "f"}}]
    assert derived_key([FIRST], tools) != derived_key([FIRST], None)
    assert derived_key([FIRST], []) == derived_key([FIRST], None)


def test_prompts_without_a_user_have_a_key_too() -> None:
    assert derived_key([SYSTEM], None)
    assert derived_key([{"role": "user", "content": "\udcff"}], None)
