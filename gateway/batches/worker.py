"""Pulls items out of the queue while replicas have headroom, and puts their ends back into it.

One worker runs in each gateway. It holds nothing that cannot be lost: what it leases comes back to the queue
when it dies, and what it computed counts only once it is in the store.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Coroutine
from typing import Any

from billing.store import StoreError
from gateway.batches.closing import BatchCloser
from gateway.batches.config import BatchesConfig
from gateway.batches.headroom import Headroom
from gateway.batches.jobs import Ending
from gateway.batches.metrics import BatchMetrics
from gateway.batches.queue import BatchQueue
from gateway.batches.runner import ItemRunner, Postponement, RunningItem, exhausted
from gateway.batches.selection import Selector
from gateway.replicas import Replica, ReplicaTable

_log = logging.getLogger(__name__)

_RENEWALS_PER_LEASE = 3
_MAX_UNSAVED = 1_000
_STORE_PAUSE_S = 1.0
_SWEEPS_PER_LOOK = 5
_STOP_WAIT_S = 5.0


class BatchWorker:
    """See the module. Belongs to one event loop; start once, stop once. ``owner`` names it in leases: the
    same for every run on one data directory, and no other gateway's.
    """

    def __init__(
        self,
        owner: str,
        queue: BatchQueue,
        closer: BatchCloser,
        selector: Selector,
        headroom: Headroom,
        runner: ItemRunner,
        table: ReplicaTable,
        metrics: BatchMetrics,
        config: BatchesConfig,
    ) -> None:
        self._owner = owner
        self._queue = queue
        self._closer = closer
        self._selector = selector
        self._headroom = headroom
        self._runner = runner
        self._table = table
        self._metrics = metrics
        self._config = config
        self._running: dict[asyncio.Task[None], RunningItem] = {}
        self._unsaved: list[Ending] = []
        self._saving: list[Ending] = []
        self._leasing = asyncio.Lock()
        self._has_work = False
        self._wanted = asyncio.Event()
        self._has_ended = asyncio.Event()
        self._tasks: list[asyncio.Task[None]] = []
        self._is_stopping = False

    def start(self) -> None:
        """Begin to work, unless batches are switched off. Call inside the event loop."""
        if not self._config.is_enabled:
            return
        for work in (
            self._pull_forever(),
            self._save_forever(),
            self._renew_forever(),
            self._sweep_forever(),
        ):
            self._tasks.append(asyncio.create_task(work))

    async def stop(self) -> None:
        """Give back what is not finished, save what is."""
        self._is_stopping = True
        tasks, self._tasks = self._tasks, []
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        for item in self._running.values():
            item.exchange.leave()
        if self._running:
            await asyncio.wait(list(self._running), timeout=_STOP_WAIT_S)
        try:
            await self._save()
            if tasks:
                await asyncio.to_thread(self._queue.renew, self._owner, [])
        except StoreError as error:
            _log.warning("%s; leases of batch items run out by themselves", error)

    def wake(self) -> None:
        """Something was submitted: look now."""
        self._has_work = True
        self._wanted.set()

    # -- pulling -------------------------------------------------------------------------------------------

    async def _pull_forever(self) -> None:
        await self._patiently(self._take_over)
        loop = asyncio.get_running_loop()
        looked_at = -self._config.poll_interval_s
        while True:
            is_busy = self._has_work or bool(self._running)
            if is_busy and loop.time() - looked_at >= self._config.poll_interval_s:
                await self._headroom.look()
                looked_at = loop.time()
                self._preempt()
            await self._patiently(self._pull)
            has_work = self._has_work or bool(self._running)
            pause_s = self._config.poll_interval_s if has_work else self._idle_pause_s
            try:
                await asyncio.wait_for(self._wanted.wait(), pause_s)
            except TimeoutError:
                continue
            self._wanted.clear()

    async def _take_over(self) -> None:
        """What a predecessor on this data directory had leased is nobody's now."""
        num_released = await asyncio.to_thread(self._queue.release_all, self._owner)
        if num_released:
            _log.warning("gave back %d batch items of a gateway that was killed", num_released)

    async def _pull(self) -> None:
        if len(self._unsaved) >= _MAX_UNSAVED:
            return
        room = {
            replica: self._headroom.room_on(replica, self._num_on(replica))
            for replica in self._table.replicas
        }
        room = {replica: num for replica, num in room.items() if num}
        if not room:
            return
        async with self._leasing:
            selected = await asyncio.to_thread(self._selector.select, self._owner, room)
            self._has_work = bool(selected)
            for item in selected:
                if item.lease.num_failures >= self._config.max_failures:
                    self._ended(exhausted(item.lease))
                else:
                    self._start(item)

    def _start(self, item: RunningItem) -> None:
        task = asyncio.create_task(self._run(item))
        self._running[task] = item
        task.add_done_callback(lambda done: self._running.pop(done))

    async def _run(self, item: RunningItem) -> None:
        outcome = await self._runner.run(item)
        if item.is_lost:
            self._metrics.num_lost += 1
        elif isinstance(outcome, Ending):
            self._ended(outcome)
        else:
            await self._put_back(item, outcome)
        self._wanted.set()

    async def _put_back(self, item: RunningItem, outcome: Postponement) -> None:
        if outcome.is_busy:
            self._headroom.report_busy(item.replica)
        try:
            await asyncio.to_thread(
                self._queue.release, item.lease, delay_s=outcome.delay_s, has_failed=outcome.has_failed
            )
        except StoreError as error:
            _log.warning("%s; the lease of a batch item runs out by itself", error)

    def _preempt(self) -> None:
        """Let the newest items make room for live requests that wait."""
        for replica in self._table.replicas:
            items = [item for item in self._running.values() if item.replica is replica]
            num = self._headroom.num_to_preempt(replica, len(items))
            for item in items[len(items) - num :]:
                if not item.exchange.is_disconnected:
                    self._metrics.num_preempted += 1
                    item.exchange.leave()

    def _num_on(self, replica: Replica) -> int:
        return sum(item.replica is replica for item in self._running.values())

    # -- saving --------------------------------------------------------------------------------------------

    def _ended(self, ending: Ending) -> None:
        self._unsaved.append(ending)
        self._has_ended.set()

    async def _save_forever(self) -> None:
        while True:
            await self._has_ended.wait()
            self._has_ended.clear()
            await self._patiently(self._save)

    async def _save(self) -> None:
        """Write all endings that wait in one transaction; whoever ends meanwhile is in the next."""
        while self._unsaved or self._saving:
            if not self._saving:
                self._saving, self._unsaved = self._unsaved, []
            try:
                result = await asyncio.to_thread(self._queue.end, self._saving)
            except StoreError:
                raise
            except Exception:  # noqa: BLE001 - one ending that cannot be written must not hold up the others
                _log.exception("%d ends of batch items could not be written", len(self._saving))
                await self._save_apart()
                continue
            num_lost = len(self._saving) - result.num_effective
            self._metrics.count_ended(self._saving, num_lost)
            self._saving = []
            for batch_id in result.done_batch_ids:
                await asyncio.to_thread(self._closer.settle, batch_id)

    async def _save_apart(self) -> None:
        """Of endings that failed together try the first alone; one that failed alone is tried again later."""
        first, *rest = self._saving
        self._unsaved = rest + self._unsaved
        self._saving = [first] if rest else []
        if not rest:
            delay_s = self._config.retry_initial_s
            await asyncio.to_thread(self._queue.release, first.lease, delay_s=delay_s, has_failed=True)

    # -- keeping -------------------------------------------------------------------------------------------

    async def _renew_forever(self) -> None:
        while True:
            await asyncio.sleep(self._config.lease_s / _RENEWALS_PER_LEASE)
            await self._patiently(self._renew)

    async def _renew(self) -> None:
        async with self._leasing:  # what is leased meanwhile would look like nobody's
            await self._renew_held()

    async def _renew_held(self) -> None:
        running = {(item.lease.key, item.lease.number): item for item in self._running.values()}
        held = [item.lease for item in running.values()]
        held += [ending.lease for ending in (*self._unsaved, *self._saving)]
        if not held:
            return
        kept = await asyncio.to_thread(self._queue.renew, self._owner, held)
        for (key, number), item in running.items():
            if (*key, number) not in kept and not item.is_lost:
                item.is_lost = True
                item.exchange.leave()

    async def _sweep_forever(self) -> None:
        num_sweeps = 0
        while True:
            await self._patiently(self._sweep)
            if num_sweeps % _SWEEPS_PER_LOOK == 0:
                await self._patiently(self._look)
            num_sweeps += 1
            await asyncio.sleep(self._config.sweep_interval_s)

    @property
    def _idle_pause_s(self) -> float:
        """Between two looks at an empty queue: a submission here wakes the worker, one elsewhere can wait."""
        return max(self._config.poll_interval_s, self._config.sweep_interval_s)

    async def _sweep(self) -> None:
        if not await asyncio.to_thread(self._queue.has_open):
            return
        num_reclaimed = await asyncio.to_thread(self._queue.reclaim_expired)
        if num_reclaimed:
            self._metrics.num_reclaimed += num_reclaimed
            _log.warning("took back %d batch items whose leases had run out", num_reclaimed)
            self._wanted.set()
        await asyncio.to_thread(self._closer.sweep)

    async def _look(self) -> None:
        await asyncio.to_thread(self._closer.delete_old)
        await asyncio.to_thread(self._metrics.look)

    async def _patiently(self, work: Callable[[], Coroutine[Any, Any, None]]) -> None:
        """Do ``work``; when the database is away, later."""
        while True:
            try:
                return await work()
            except StoreError as error:
                _log.warning("batches: %s", error)
            except Exception:  # noqa: BLE001 - the top guard of the worker, without which batches would stand
                _log.exception("batches: the worker failed")
            await asyncio.sleep(_STORE_PAUSE_S)
