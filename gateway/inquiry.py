"""Asks a replica what a request used whose answer has no end: it is told to stop, and says when it has.

Nobody waits for the answer but the usage record, so the wait can be as long as a replica may need to end a
step of a long prompt. A replica that does not confirm the abort in time is asked once more, for what it
remembers of the request.
"""

from __future__ import annotations

import asyncio
import logging

import msgspec

from backend.wire import AbortRequest, RecentUsage, RecentUsages, TokenUsage
from gateway.client import ReplicaClient, ReplicaError
from gateway.replicas import Replica
from gateway.wire.replica import ABORT_PATH, USAGES_PATH, decode_abort_result

_log = logging.getLogger(__name__)

_BEFORE_LOOK_UP_S = 0.25
"""The abort may have overtaken the request itself, which then ends a moment later."""
_LOOK_UP_TIMEOUT_S = 2.0


class UsageInquiry:
    """Final counts of interrupted requests. Belongs to one event loop."""

    def __init__(
        self, client: ReplicaClient, headers: tuple[tuple[str, str], ...], *, abort_wait_s: float
    ) -> None:
        self._client = client
        self._headers = headers
        self._abort_wait_s = abort_wait_s
        self._asking: set[asyncio.Task[TokenUsage | None]] = set()
        self._is_closed = False

    async def final_usage(self, replica: Replica, request_id: str) -> TokenUsage | None:
        """Stop a request on ``replica``; what it used until then, or None when that cannot be learnt."""
        if self._is_closed:
            return None
        asking = asyncio.create_task(self._ask(replica, request_id))
        self._asking.add(asking)
        asking.add_done_callback(self._asking.discard)
        await asyncio.wait((asking,))
        return None if asking.cancelled() else asking.result()

    def close(self) -> None:
        """Give up what is being asked, and ask nothing more (for the stop of the gateway)."""
        self._is_closed = True
        for asking in self._asking:
            asking.cancel()

    async def _ask(self, replica: Replica, request_id: str) -> TokenUsage | None:
        recent = await self._abort(replica, request_id)
        if recent is None:
            await asyncio.sleep(_BEFORE_LOOK_UP_S)
            recent = await self._look_up(replica, request_id)
        return None if recent is None else recent.usage

    async def _abort(self, replica: Replica, request_id: str) -> RecentUsage | None:
        try:
            status, body = await self._client.fetch(
                replica.address,
                ABORT_PATH,
                self._headers,
                msgspec.json.encode(AbortRequest(request_id)),
                method="POST",
                timeout_s=self._abort_wait_s,
            )
            return decode_abort_result(body).usage if status == 200 else None
        except (ReplicaError, msgspec.DecodeError) as error:
            _log.info("request %s: the abort was not confirmed: %s", request_id, error)
            return None

    async def _look_up(self, replica: Replica, request_id: str) -> RecentUsage | None:
        path = f"{USAGES_PATH}?request_id={request_id}"
        try:
            status, body = await self._client.fetch(
                replica.address, path, self._headers, timeout_s=_LOOK_UP_TIMEOUT_S
            )
            usages = msgspec.json.decode(body, type=RecentUsages).usages if status == 200 else []
        except (ReplicaError, msgspec.DecodeError) as error:
            _log.warning("request %s: its usage is estimated: %s", request_id, error)
            return None
        return next((usage for usage in usages if usage.request_id == request_id), None)
