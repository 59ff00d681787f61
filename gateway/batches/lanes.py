"""Which replica a group of items runs on, told in the words of ordinary routing.

Items are routed as live requests are, by an affinity key. The key of a group's lane 0 is owned by some
replica: the group's home. A replica that has nothing better to do runs items of foreign groups in the first
lane that it owns; every gateway finds the same one, so a foreign group, too, meets its own blocks again.
"""

from __future__ import annotations

from collections.abc import Sequence

from gateway.replicas import Replica
from gateway.routing import Ranking

_MAX_LANES = 64


class Lanes:
    """See the module."""

    def __init__(self, ranking: Ranking[Replica]) -> None:
        self._ranking = ranking

    def is_home(self, replica: Replica, account_id: str, group: str, candidates: Sequence[Replica]) -> bool:
        """Whether ``replica`` is where the group belongs while these replicas are there."""
        return self._owner(account_id, _key(group, 0), candidates) is replica

    def key_for(self, replica: Replica, account_id: str, group: str, candidates: Sequence[Replica]) -> str:
        """The affinity key under which items of the group come to ``replica``."""
        for lane in range(_MAX_LANES):
            key = _key(group, lane)
            if self._owner(account_id, key, candidates) is replica:
                return key
        return _key(group, 0)  # so many misses are next to impossible; home is always right

    def _owner(self, account_id: str, key: str, candidates: Sequence[Replica]) -> Replica | None:
        ranked = self._ranking(account_id, key, candidates)
        return ranked[0] if ranked else None


def _key(group: str, lane: int) -> str:
    return f"batch-{group}" if lane == 0 else f"batch-{group}-{lane}"
