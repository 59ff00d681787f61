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
from uhashring import HashRing
from xxhash import xxh3_64_intdigest, xxh3_128

from gateway.framing import framed

_HALF = 0.5
_RANGE = 2.0**64
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


def rank_by_rendezvous(account_id: str, key: str, candidates: Sequence[AnyCandidate]) -> list[AnyCandidate]:
    """Candidates by descending score ``-weight / ln(u)``, where u in (0, 1) is the hash of (account, key,
    id).

    An exponential race: each candidate wins in proportion to its weight, whichever others take part. Sorting
    by ``ln(u) / weight`` gives the same order and cannot divide by zero.
    """
    prefix = framed(account_id.encode(), key.encode("utf-8", "surrogatepass"))
    scored = []
    for candidate in candidates:
        u = (xxh3_64_intdigest(prefix + framed(candidate.id.encode())) + _HALF) / _RANGE
        scored.append((log(u) / candidate.weight, candidate.id, candidate))
    scored.sort(key=_score, reverse=True)
    return [candidate for _, _, candidate in scored]


def _score(entry: tuple[float, str, Any]) -> tuple[float, str]:
    return entry[0], entry[1]


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
