"""Which items go to which replica next: accounts in turn, the oldest batch of each, prefixes at home.

Blocking: it leases what it selects.
"""

from __future__ import annotations

import itertools
from collections.abc import Mapping, Sequence

from gateway.batches.jobs import Lease
from gateway.batches.lanes import Lanes
from gateway.batches.queue import BatchQueue, Runnable
from gateway.batches.runner import RunningItem
from gateway.catalog import Catalog
from gateway.errors import Refusal
from gateway.replicas import Replica, ReplicaTable

_MAX_BATCHES = 200
_MAX_PROBED_GROUPS = 16
_MAX_REMEMBERED = 1_000


class Selector:
    """See the module. Used by one thread at a time."""

    def __init__(self, queue: BatchQueue, lanes: Lanes, table: ReplicaTable, catalog: Catalog) -> None:
        self._queue = queue
        self._lanes = lanes
        self._table = table
        self._catalog = catalog
        self._turn = itertools.count(1)
        self._last_turn: dict[str, int] = {}
        self._group: dict[tuple[str, str], str] = {}

    def select(self, owner: str, room: Mapping[Replica, int]) -> list[RunningItem]:
        """Lease items for replicas that have ``room``. Raises StoreError."""
        runnable = self._queue.runnable(_MAX_BATCHES)
        self._forget(runnable)
        selected: list[RunningItem] = []
        for replica, num in room.items():
            selected += self._select_for(owner, replica, num, runnable)
        return selected

    def _select_for(
        self, owner: str, replica: Replica, room: int, runnable: Sequence[Runnable]
    ) -> list[RunningItem]:
        selected: list[RunningItem] = []
        waiting = [batch for batch in runnable if self._is_served_by(replica, batch)]
        while waiting and len(selected) < room:
            batch = min(waiting, key=lambda batch: self._last_turn.get(batch.account_id, 0))
            self._last_turn[batch.account_id] = next(self._turn)
            num_accounts = len({each.account_id for each in waiting})
            left = room - len(selected)
            items = self._lease(owner, replica, batch, -(-left // num_accounts))
            selected += items
            if not items:
                waiting.remove(batch)
        return selected

    def _lease(self, owner: str, replica: Replica, batch: Runnable, room: int) -> list[RunningItem]:
        """Items of the group that the replica is at, or else of the next one that suits it."""
        ready = self._ready_for(batch)
        place = batch.id, replica.id
        current = self._group.get(place, "")
        leases = self._queue.lease(batch.id, current, owner, room) if current else []
        if not leases:
            group = self._next_group(replica, batch, current, ready)
            if group is None:
                return []
            self._group[place] = group
            leases = self._queue.lease(batch.id, group, owner, room)
        return [RunningItem(lease, replica, self._key(replica, lease, ready)) for lease in leases]

    def _next_group(
        self, replica: Replica, batch: Runnable, after: str, ready: Sequence[Replica]
    ) -> str | None:
        """A group at home on the replica if one is near, else the nearest; None when nothing is left."""
        groups = self._queue.groups(batch.id, after, _MAX_PROBED_GROUPS)
        if len(groups) < _MAX_PROBED_GROUPS and after:
            groups += self._queue.groups(batch.id, "", _MAX_PROBED_GROUPS)
        homes = (group for group in groups if self._lanes.is_home(replica, batch.account_id, group, ready))
        return next(homes, groups[0] if groups else None)

    def _key(self, replica: Replica, lease: Lease, ready: Sequence[Replica]) -> str:
        return self._lanes.key_for(replica, lease.account_id, lease.prefix_group, ready)

    def _is_served_by(self, replica: Replica, batch: Runnable) -> bool:
        return replica in self._ready_for(batch)

    def _ready_for(self, batch: Runnable) -> list[Replica]:
        """Ready replicas of the batch's model; of a model that is gone all of them, so that its items can be
        refused.
        """
        try:
            candidates: Sequence[Replica] = self._table.serving(self._catalog.find(batch.model).id)
        except Refusal:
            candidates = self._table.replicas
        return [replica for replica in candidates if replica.health == "ready"]

    def _forget(self, runnable: Sequence[Runnable]) -> None:
        """Remember nothing of batches that have ended, once there are many."""
        if len(self._group) > _MAX_REMEMBERED:
            ids = {batch.id for batch in runnable}
            self._group = {place: group for place, group in self._group.items() if place[0] in ids}
        if len(self._last_turn) > _MAX_REMEMBERED:
            accounts = {batch.account_id for batch in runnable}
            self._last_turn = {
                account: turn for account, turn in self._last_turn.items() if account in accounts
            }
