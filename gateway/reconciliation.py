"""Writes the usage records that a killed gateway could not: from what replicas remember of recent requests.

Done when a replica becomes ready, at the start above all, and a few times soon after: the requests of a
gateway that was killed a moment ago are only just ending on the replicas. A request that is found this way
never ended for its client: the gateway makes a record durable before it lets the end of an answer out. So the
record says ``error``: the counts are kept, and the client is not charged for what was our failure.

Only requests of this gateway, by its own identity that outlives it, are looked at. What another one served
may be in that one's journal still, and a record of ours would come before the right one.
"""

from __future__ import annotations

import asyncio
import logging
from collections import OrderedDict
from collections.abc import Awaitable, Callable, Collection, Sequence
from typing import Protocol

import msgspec

from backend.wire import RecentUsage, RecentUsages, TokenUsage
from billing.store import StoreError
from billing.usage import InvalidUsageError, UsageRecord
from gateway.client import ReplicaClient, ReplicaError
from gateway.metering import MeteringUnavailableError
from gateway.records import plausible
from gateway.replicas import Replica
from gateway.wire.replica import USAGES_PATH, BillingContext, decode_billing_context

_log = logging.getLogger(__name__)

_MICROS = 1_000_000
_RECORDED_WITH_RESULT = "batch"
"""Items of batches are run again until they have a result, and their usage is written with it."""

_PASSES_AFTER_S = (0.0, 1.0, 5.0, 15.0)


class PostedRecords(Protocol):
    """What has been posted already; blocking."""

    def has_record(self, request_ids: Collection[str]) -> set[str]:
        """Those of ``request_ids`` that have been posted. Raises StoreError."""


class KnownRequests:
    """Request ids that this process answers for: running ones, and the last ``max_finished`` that it
    recorded.
    """

    def __init__(self, max_finished: int) -> None:
        self._max_finished = max_finished
        self._running: set[str] = set()
        self._finished: OrderedDict[str, None] = OrderedDict()

    @property
    def num_running(self) -> int:
        return len(self._running)

    def started(self, request_id: str) -> None:
        self._running.add(request_id)

    def ended(self, request_id: str) -> None:
        """Its record was written, or it needs none."""
        self._running.discard(request_id)
        self._finished[request_id] = None
        if len(self._finished) > self._max_finished:
            self._finished.popitem(last=False)

    def failed(self, request_id: str) -> None:
        """Its record could not be written; somebody may try again."""
        self._running.discard(request_id)

    def __contains__(self, request_id: str) -> bool:
        return request_id in self._running or request_id in self._finished


class Reconciler:
    """Reads replicas' recent usages and commits the records that are missing."""

    def __init__(
        self,
        client: ReplicaClient,
        headers: Sequence[tuple[str, str]],
        posted: PostedRecords,
        known: KnownRequests,
        commit: Callable[[UsageRecord], Awaitable[None]],
        *,
        gateway_id: str,
        timeout_s: float,
    ) -> None:
        """``gateway_id`` is what this gateway's requests say they come from."""
        self._gateway_id = gateway_id
        self._client = client
        self._headers = tuple(headers)
        self._posted = posted
        self._known = known
        self._commit = commit
        self._timeout_s = timeout_s
        self._read_until: dict[str, tuple[float, int]] = {}
        self._locks: dict[str, asyncio.Lock] = {}

    async def follow(self, replica: Replica) -> None:
        """Reconcile now and, while the replica stays ready, a few times more."""
        started = asyncio.get_running_loop().time()
        for after_s in _PASSES_AFTER_S:
            await asyncio.sleep(started + after_s - asyncio.get_running_loop().time())
            if replica.health != "ready":
                return
            await self.reconcile(replica)

    async def reconcile(self, replica: Replica) -> int:
        """Write what is missing of one replica; returns how many records. Failures are logged and tried next
        time.
        """
        lock = self._locks.setdefault(replica.id, asyncio.Lock())
        async with lock:
            try:
                num_written = await self._reconcile(replica)
            except (ReplicaError, msgspec.DecodeError, StoreError, MeteringUnavailableError) as error:
                _log.warning("replica %s: recent usages not reconciled: %s", replica.id, error)
                return 0
        if num_written:
            _log.warning(
                "replica %s: wrote %d usage records of interrupted requests", replica.id, num_written
            )
        return num_written

    async def _reconcile(self, replica: Replica) -> int:
        started_at, after = self._read_until.get(replica.id, (0.0, 0))
        page = await self._fetch(replica, after)
        if page.started_at != started_at and after:  # restarted since: its sequence began anew
            page = await self._fetch(replica, 0)
        num_written = 0
        while page.usages:
            num_written += await self._write_missing(page)
            self._read_until[replica.id] = (page.started_at, page.next_after)
            page = await self._fetch(replica, page.next_after)
        return num_written

    async def _write_missing(self, page: RecentUsages) -> int:
        records = [
            record
            for usage in page.usages
            if usage.request_id not in self._known
            and (record := self._record_of(usage, page.replica_id)) is not None
            and record.surface != _RECORDED_WITH_RESULT
        ]
        if not records:
            return 0
        posted = await asyncio.to_thread(self._posted.has_record, [one.request_id for one in records])
        missing = [record for record in records if record.request_id not in posted]
        await asyncio.gather(*(self._write(record) for record in missing))
        return len(missing)

    def _record_of(self, recent: RecentUsage, replica_id: str) -> UsageRecord | None:
        context = decode_billing_context(recent.billing_context)
        if context is None or context.gateway_id != self._gateway_id:
            return None
        try:
            return _record_from(recent, context, recent.usage, replica_id, is_estimated=False)
        except InvalidUsageError as error:
            _log.error("request %s: the replica's usage cannot be true: %s", recent.request_id, error)
            return _record_from(recent, context, plausible(recent.usage), replica_id, is_estimated=True)

    async def _write(self, record: UsageRecord) -> None:
        self._known.started(record.request_id)
        try:
            await self._commit(record)
        except BaseException:
            self._known.failed(record.request_id)
            raise
        self._known.ended(record.request_id)

    async def _fetch(self, replica: Replica, after: int) -> RecentUsages:
        path = f"{USAGES_PATH}?after={after}"
        status, body = await self._client.fetch(
            replica.address, path, self._headers, timeout_s=self._timeout_s
        )
        if status != 200:
            raise ReplicaError(replica.id, f"{USAGES_PATH} answered {status}")
        return msgspec.json.decode(body, type=RecentUsages)


def _record_from(
    recent: RecentUsage, context: BillingContext, usage: TokenUsage, replica_id: str, *, is_estimated: bool
) -> UsageRecord:
    return UsageRecord(
        request_id=recent.request_id,
        account_id=context.account_id,
        token_id=context.token_id,
        model=context.model,
        requested_model=context.requested_model,
        surface=context.surface,
        replica_id=replica_id,
        session=context.session,
        started_at_us=context.started_at_us,
        finished_at_us=max(int(recent.finished_at * _MICROS), context.started_at_us),
        prompt_tokens=usage.prompt_tokens,
        cached_prompt_tokens=usage.cached_prompt_tokens,
        completion_tokens=usage.completion_tokens,
        reasoning_tokens=usage.completion_tokens_details.reasoning_tokens,
        status="error",
        is_estimated=is_estimated,
        num_cached_blocks=usage.num_cached_blocks,
        cache_head=usage.cache_head,
    )
