"""The requests in progress: found by id, stopped on demand, remembered when they have ended."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager

from backend.embeddings.batcher import Job
from backend.http.errors import duplicate_request
from backend.metrics import ReplicaMetrics
from backend.recent_usages import RecentUsageLog
from backend.wire import FinishReason, Pooling, RecentUsage, ReplicaEmbeddingsRequest, TokenUsage


class Jobs:
    """Open jobs of one replica. Belongs to one event loop."""

    def __init__(self, usages: RecentUsageLog, metrics: ReplicaMetrics) -> None:
        self._usages = usages
        self._metrics = metrics
        self._open: dict[str, Job] = {}
        self._ended: dict[str, asyncio.Event] = {}
        self._idle = asyncio.Event()
        self._idle.set()

    @property
    def num_open(self) -> int:
        return len(self._open)

    @asynccontextmanager
    async def open(
        self, request: ReplicaEmbeddingsRequest, inputs: Sequence[Sequence[int]], pooling: Pooling
    ) -> AsyncIterator[Job]:
        """A job for the block's duration; one that computed anything leaves a recent usage.

        Raises:
            ReplicaError: 409 when a request with this id is in progress.
        """
        request_id = request.request_id
        if request_id in self._open:
            raise duplicate_request(request_id)
        job = self._open[request_id] = Job(inputs, pooling, asyncio.get_running_loop().create_future())
        ended = self._ended[request_id] = asyncio.Event()
        self._idle.clear()
        reason: FinishReason = "error"
        try:
            yield job
            reason = "stop"
        except asyncio.CancelledError:
            reason = "abort"
            raise
        finally:
            job.done.cancel()
            if job.is_started:
                self._remember(request, job, reason)
            del self._open[request_id], self._ended[request_id]
            ended.set()
            if not self._open:
                self._idle.set()

    async def abort(self, request_id: str) -> RecentUsage | None:
        """Stop a request and wait for its end. Does nothing to one that is over or unknown."""
        job, ended = self._open.get(request_id), self._ended.get(request_id)
        if job is not None and ended is not None:
            job.done.cancel()
            await ended.wait()
        return self._usages.find(request_id)

    async def wait_idle(self) -> None:
        """Until no job is open."""
        await self._idle.wait()

    def _remember(self, request: ReplicaEmbeddingsRequest, job: Job, reason: FinishReason) -> None:
        usage = TokenUsage.of(prompt=job.num_computed_tokens, completion=0)
        self._usages.record(request.request_id, request.billing_context, usage, reason)
        self._metrics.count_end(usage, reason)
