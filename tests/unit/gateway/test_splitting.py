from __future__ import annotations

from types import SimpleNamespace
from typing import Any, cast

from backend.wire import Health, Role
from gateway.call import Call
from gateway.config import ReplicaAddress, RoutingConfig
from gateway.predictions import CachePredictions
from gateway.replicas import Replica
from gateway.routing import RendezvousRanking
from gateway.splitting import Splitter

LONG, SHORT = b"x" * 4 * 1000, b"x" * 4 * 100


def replica_of(name: str, role: Role, *, room: int = 10_000, health: Any = "ready") -> Replica:
    replica = Replica(ReplicaAddress(id=name, url="http://127.0.0.1:1"))
    transfer = "" if role == "decode" else f"{name}:9"
    replica.note(
        Health(
            status="ready",
            replica_id=name,
            role=role,
            transfer=transfer,
            can_fetch=role != "prefill",
            kv_room_tokens=room,
        )
    )
    replica.health = health
    return replica


def call_of(body: bytes = LONG, key: str = "key") -> Call:
    return cast(
        Call,
        SimpleNamespace(
            account_id="account",
            affinity_key=key,
            exchange=SimpleNamespace(body=body),
            images=SimpleNamespace(num_url_chars=0),
            request=SimpleNamespace(max_tokens=100, num_choices=1),
            model=SimpleNamespace(max_model_len=8192, default_max_tokens=256),
        ),
    )


def splitter_of(predictions: CachePredictions | None = None, **routing: Any) -> Splitter:
    config = RoutingConfig(**{"min_split_tokens": 256, **routing})
    return Splitter(RendezvousRanking(), RendezvousRanking(), predictions or CachePredictions(10), config)


def test_prefill_replicas_answer_nobody() -> None:
    pool = [replica_of("p", "prefill"), replica_of("d1", "decode"), replica_of("d2", "decode")]
    ranking = splitter_of().rank(call_of(), pool)
    assert {replica.id for replica in ranking} == {"d1", "d2"}
    assert splitter_of().rank(call_of(), pool[:1]) == []


def test_without_roles_the_ranking_is_that_of_the_key_whatever_the_room() -> None:
    pool = [replica_of(name, "both", room=0) for name in ("a", "b", "c")]
    expected = RendezvousRanking()("account", "key", pool)
    assert splitter_of().rank(call_of(), pool) == expected
    assert splitter_of().choose_prefill(call_of(), expected[0], pool) is None


def test_an_answer_goes_where_there_is_room_for_it_and_else_to_the_owner_of_its_key() -> None:
    roomy = [replica_of(name, "decode") for name in ("a", "b", "c")]
    owner, second, third = splitter_of().rank(call_of(), roomy)
    owner.kv_room_tokens = 1099
    assert splitter_of().rank(call_of(), roomy) == [second, third, owner]
    owner.kv_room_tokens = 1100
    assert splitter_of().rank(call_of(), roomy) == [owner, second, third]
    for replica, room in ((owner, 10), (second, 500), (third, 20)):
        replica.kv_room_tokens = room
    assert splitter_of().rank(call_of(), roomy) == [second, third, owner]
    owner.kv_room_tokens = -1
    assert splitter_of().rank(call_of(), roomy)[0] is owner, "who does not say has room"


def test_only_long_prompts_that_are_not_cached_are_computed_elsewhere() -> None:
    prefill, decode = replica_of("p", "prefill"), replica_of("d", "decode")
    pool = [prefill, decode]
    predictions = CachePredictions(10)
    splitter = splitter_of(predictions)
    assert splitter.choose_prefill(call_of(LONG), decode, pool) is prefill
    assert splitter.choose_prefill(call_of(SHORT), decode, pool) is None
    predictions.learn("account", "key", "d", 800)
    assert splitter.choose_prefill(call_of(LONG), decode, pool) is None, "its last turn is there"
    predictions.learn("account", "key", "another", 800)
    assert splitter.choose_prefill(call_of(LONG), decode, pool) is prefill


def test_prompts_that_begin_alike_meet_and_a_full_or_lost_replica_is_passed_over() -> None:
    pool = [replica_of(f"p{number}", "prefill") for number in range(3)]
    decode = replica_of("d", "decode")
    splitter = splitter_of(max_prefills_per_replica=2)
    first = splitter.choose_prefill(call_of(), decode, [*pool, decode])
    assert first is not None
    assert splitter.choose_prefill(call_of(), decode, [*pool, decode]) is first
    first.num_prefills = 2
    second = splitter.choose_prefill(call_of(), decode, [*pool, decode])
    assert second not in (first, None)
    assert second is not None
    second.health = "down"
    third = splitter.choose_prefill(call_of(), decode, [*pool, decode])
    assert third not in (first, second, None)
    assert third is not None
    third.health = "draining"
    assert splitter.choose_prefill(call_of(), decode, [*pool, decode]) is None


def test_who_cannot_fetch_computes_by_itself() -> None:
    prefill, foreign = replica_of("p", "prefill"), replica_of("v", "both")
    foreign.can_fetch = False
    assert splitter_of().choose_prefill(call_of(), foreign, [prefill, foreign]) is None
