"""How many items a replica may get: what is left behind live traffic, and nothing while anybody waits.

Three signs say that live requests need a replica for themselves: they wait in this gateway for room on any
replica, many of this gateway's requests are on it, or sequences wait inside it, whoever sent them. An item
never waits inside a replica itself: it is sent with ``reject_if_busy``.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence

import msgspec

from backend.wire import ReplicaStats
from gateway.batches.config import BatchesConfig
from gateway.client import ReplicaClient, ReplicaError
from gateway.replicas import Replica, ReplicaTable

_STATS_PATH = "/stats"
_MAX_STATS_BYTES = 64 * 1024
_STATS_TIMEOUT_S = 1.0
_BUSY_PAUSE_S = 0.5


class Headroom:
    """See the module. Belongs to one event loop; ``clock`` is its time."""

    def __init__(
        self,
        table: ReplicaTable,
        client: ReplicaClient,
        headers: Sequence[tuple[str, str]],
        config: BatchesConfig,
        clock: Callable[[], float],
    ) -> None:
        self._table = table
        self._client = client
        self._headers = tuple(headers)
        self._config = config
        self._clock = clock
        self._num_waiting: dict[str, int] = {}
        self._num_waiting_before: dict[str, int] = {}
        self._paused_until: dict[str, float] = {}

    async def look(self) -> None:
        """Ask the ready replicas how many sequences wait in them."""
        self._num_waiting_before = dict(self._num_waiting)
        ready = [replica for replica in self._table.replicas if replica.health == "ready"]
        await asyncio.gather(*(self._ask(replica) for replica in ready))

    def room_on(self, replica: Replica, num_items: int) -> int:
        """How many more items ``replica`` may get, which has ``num_items`` of this gateway's."""
        if replica.health != "ready" or self._is_needed(replica):
            return 0
        if self._clock() < self._paused_until.get(replica.id, 0.0):
            return 0
        config = self._config
        room = min(
            config.max_in_flight_per_replica - num_items, config.max_busy_in_flight - replica.num_in_flight
        )
        return max(room, 0)

    def num_to_preempt(self, replica: Replica, num_items: int) -> int:
        """How many of the replica's ``num_items`` items must make room for live requests.

        What waits inside a replica counts when it was seen to wait twice, since every sequence does for a
        step, and only as far as this gateway has live requests there: items may wait there for each other.
        """
        inside = min(self._num_waiting.get(replica.id, 0), self._num_waiting_before.get(replica.id, 0))
        num_live = max(replica.num_in_flight - num_items, 0)
        return min(num_items, min(inside, num_live) + self._table.num_waiting)

    def report_busy(self, replica: Replica) -> None:
        """The replica had no room for an item: it is left alone for a moment."""
        self._paused_until[replica.id] = self._clock() + _BUSY_PAUSE_S

    def _is_needed(self, replica: Replica) -> bool:
        return self._table.num_waiting > 0 or self._num_waiting.get(replica.id, 0) > 0

    async def _ask(self, replica: Replica) -> None:
        try:
            status, body = await self._client.fetch(
                replica.address,
                _STATS_PATH,
                self._headers,
                timeout_s=_STATS_TIMEOUT_S,
                limit=_MAX_STATS_BYTES,
            )
            stats = msgspec.json.decode(body, type=ReplicaStats) if status == 200 else None
        except (ReplicaError, msgspec.DecodeError):
            stats = None
        self._num_waiting[replica.id] = 0 if stats is None else stats.num_waiting
