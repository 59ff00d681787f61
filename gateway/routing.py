"""Which replica serves a request: the one that owns (account, affinity key), by hashing alone.

There is no table of sessions. Every gateway process ranks the replicas of a key in the same order, so turns
of one conversation meet again where its prefix is cached, and the ranking is at the same time the failover
order: when the owner is gone or full, everyone agrees on the next. Rendezvous hashing moves a key only when
its owner leaves or when a newcomer wins it; `ring` is the consistent-hash ring of uhashring, for pools that
must agree with one.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from math import log
from typing import Any, Protocol, TypeVar

import msgspec
import numpy as np
from numpy.typing import NDArray
from uhashring import HashRing
from xxhash import xxh3_64_intdigest, xxh3_128

from gateway.framing import framed

_HALF = 0.5
_RANGE = 2.0**64
_MASK = 2**64 - 1
_MIX_1 = 0xBF58476D1CE4E5B9
_MIX_2 = 0x94D049BB133111EB
_MIN_ARRAY = 32
"""From so many candidates on, scoring them as an array is faster than one by one."""
_MAX_POOLS = 64
_RING_POINTS_PER_WEIGHT = 160


class Candidate(Protocol):
    """What can be ranked. ``weight`` is its share of the keys beside the others', greater than 0."""

    @property
    def id(self) -> str: ...

    @property
    def weight(self) -> float: ...


AnyCandidate = TypeVar("AnyCandidate", bound=Candidate)
Ranking = Callable[[str, str, Sequence[AnyCandidate]], list[AnyCandidate]]
"""(account id, affinity key, candidates) -> candidates, owner first."""


class RendezvousRanking:
    """Candidates by descending score ``-weight / ln(u)``, where u in (0, 1) hashes (account, key, id).

    An exponential race: each candidate wins in proportion to its weight, whichever others take part. Sorting
    by ``ln(u) / weight`` gives the same order and cannot divide by zero.

    The key and each id are hashed by themselves and then mixed, so that ids are hashed once per pool and a
    large pool is scored as one array. Id and weight of a candidate must not change while it is in a pool.
    """

    def __init__(self) -> None:
        self._pools: dict[tuple[Any, ...], _Pool] = {}

    def __call__(self, account_id: str, key: str, candidates: Sequence[AnyCandidate]) -> list[AnyCandidate]:
        members = tuple(candidates)
        if len(members) == 1:
            return [*members]
        pool = self._pools.get(members)
        if pool is None:
            if len(self._pools) >= _MAX_POOLS:
                self._pools.clear()
            pool = self._pools[members] = _Pool(members)
        key_hash = xxh3_64_intdigest(framed(account_id.encode(), key.encode("utf-8", "surrogatepass")))
        if len(members) < _MIN_ARRAY:
            return pool.rank_few(key_hash)
        return pool.rank_many(key_hash)


class _Pool:
    """Candidates with the hashes of their ids, in the order of the ids, so that equal scores have one too."""

    def __init__(self, members: Sequence[Any]) -> None:
        self._members = sorted(members, key=lambda member: member.id)
        self._member_array = np.empty(len(self._members), dtype=object)
        for index, member in enumerate(self._members):
            self._member_array[index] = member
        self._hashes = [xxh3_64_intdigest(member.id.encode()) for member in self._members]
        self._weights = [member.weight for member in self._members]
        self._hash_array = np.array(self._hashes, dtype=np.uint64)
        self._weight_array = np.array(self._weights, dtype=np.float64)

    def rank_few(self, key_hash: int) -> list[Any]:
        scores = [
            log((_mixed(key_hash ^ id_hash) + _HALF) / _RANGE) / weight
            for id_hash, weight in zip(self._hashes, self._weights, strict=True)
        ]
        order = sorted(range(len(scores)), key=scores.__getitem__, reverse=True)
        return [self._members[index] for index in order]

    def rank_many(self, key_hash: int) -> list[Any]:
        mixed = _mixed_array(self._hash_array ^ np.uint64(key_hash))
        scores = np.log((mixed + _HALF) / _RANGE) / self._weight_array
        ranked: list[Any] = self._member_array[np.argsort(-scores, kind="stable")].tolist()
        return ranked


def _mixed(value: int) -> int:
    """The finaliser of SplitMix64 (Steele, Lea, Flood: Fast Splittable Pseudorandom Number Generators, 2014):
    every bit of the result depends on every bit of ``value``.
    """
    value = (value ^ (value >> 30)) * _MIX_1 & _MASK
    value = (value ^ (value >> 27)) * _MIX_2 & _MASK
    return value ^ (value >> 31)


def _mixed_array(values: NDArray[np.uint64]) -> NDArray[np.uint64]:
    values = (values ^ (values >> np.uint64(30))) * np.uint64(_MIX_1)
    values = (values ^ (values >> np.uint64(27))) * np.uint64(_MIX_2)
    return values ^ (values >> np.uint64(31))


class RingRanking:
    """Candidates in the order in which a consistent-hash ring meets them. The ring is rebuilt when the pool
    changes.
    """

    def __init__(self) -> None:
        self._members: tuple[tuple[str, float], ...] = ()
        self._ring = HashRing()

    def __call__(self, account_id: str, key: str, candidates: Sequence[AnyCandidate]) -> list[AnyCandidate]:
        members = tuple((candidate.id, candidate.weight) for candidate in candidates)
        if members != self._members:
            self._ring = _build_ring(members)
            self._members = members
        by_id = {candidate.id: candidate for candidate in candidates}
        name = xxh3_128(framed(account_id.encode(), key.encode("utf-8", "surrogatepass"))).hexdigest()
        return [by_id[node["nodename"]] for node in self._ring.range(name)]


def _build_ring(members: Iterable[tuple[str, float]]) -> HashRing:
    """Weights become numbers of points; the ring itself knows whole weights only."""
    nodes = {
        member: {"weight": 1, "vnodes": max(1, round(weight * _RING_POINTS_PER_WEIGHT))}
        for member, weight in members
    }
    return HashRing(nodes=nodes)


def derived_key(messages: Sequence[dict[str, Any]], tools: Sequence[dict[str, Any]] | None) -> str:
    """An affinity key for a request that names none: the part of its prompt that later turns repeat.

    That is the tools, the leading system messages, and the first message of a user.
    """
    digest = xxh3_128(framed(msgspec.json.encode(tools)) if tools else b"")
    for message in messages:
        role, content = message.get("role"), message.get("content")
        text = (
            content.encode("utf-8", "surrogatepass")
            if isinstance(content, str)
            else msgspec.json.encode(content)
        )
        digest.update(framed(str(role).encode(), text))
        if role == "user":
            break
    return digest.hexdigest()
