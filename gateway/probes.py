"""Asks every replica how it is, again and again."""

from __future__ import annotations

import asyncio
import logging

import msgspec

from backend.wire import Health
from gateway.client import ReplicaClient, ReplicaError
from gateway.config import HealthConfig
from gateway.replicas import Replica, ReplicaTable

_log = logging.getLogger(__name__)
_MAX_HEALTH_BYTES = 64 * 1024


class HealthProber:
    """One task per replica, each probing every ``probe_interval_s`` as long as the table has the replica."""

    def __init__(self, table: ReplicaTable, client: ReplicaClient, config: HealthConfig) -> None:
        self._table = table
        self._client = client
        self._config = config
        self._tasks: set[asyncio.Task[None]] = set()

    async def start(self) -> None:
        """Probe every replica once, so that the table is right from the first request on; then go on
        probing.
        """
        await asyncio.gather(*(self._probe(replica) for replica in self._table.replicas))
        for replica in self._table.replicas:
            self._begin(replica, self._config.probe_interval_s)
        self._table.on_added(lambda replica: self._begin(replica, 0.0))

    async def stop(self) -> None:
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)
        self._tasks = set()

    def _begin(self, replica: Replica, delay_s: float) -> None:
        task = asyncio.create_task(self._keep_probing(replica, delay_s))
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    async def _keep_probing(self, replica: Replica, delay_s: float) -> None:
        await asyncio.sleep(delay_s)
        while replica in self._table.replicas:
            await self._probe(replica)
            await asyncio.sleep(self._config.probe_interval_s)

    async def _probe(self, replica: Replica) -> None:
        before = replica.health
        said = await self._ask(replica)
        if replica not in self._table.replicas:
            return
        if said is None:
            self._table.report_failure(replica)
        else:
            replica.note(said)
            self._table.report_answer(replica, said.status)
        if replica.health != before:
            _log.info("replica %s: %s -> %s", replica.id, before, replica.health)

    async def _ask(self, replica: Replica) -> Health | None:
        """What the replica says about itself; None when it says nothing, or nothing that can be
        understood.
        """
        try:
            status, body = await self._client.fetch(
                replica.address, "/health", timeout_s=self._config.probe_timeout_s, limit=_MAX_HEALTH_BYTES
            )
        except ReplicaError:
            return None
        try:
            return msgspec.json.decode(body, type=Health)
        except msgspec.DecodeError:  # an OpenAI-compatible server of another make
            return Health(status="ready", replica_id=replica.id) if status == 200 else None
