"""The requests in progress: how many there may be, how each ends, and who can stop it.

Owner of state: one replica. Invariants: a request whose generation began ends in exactly one recent usage,
whatever happened to it, and its sequences are over by then; a request that was refused leaves none. A request
is found by its id until then.
"""

from __future__ import annotations

import asyncio
import logging
import time
from dataclasses import dataclass, field
from typing import Final

from backend.http.errors import ReplicaError, duplicate_request, refused
from backend.http.generation import Delta, Generation
from backend.metrics import ReplicaMetrics
from backend.recent_usages import RecentUsageLog
from backend.telemetry import RequestSpan
from backend.wire import FinishReason, RecentUsage, ReplicaRequest, TokenUsage

# How long the engine may take to confirm an abort before the counts stay at what has arrived. A step of a
# long prompt on few cores can take seconds.
_SETTLE_TIMEOUT_S: Final = 12.0

_log = logging.getLogger("backend.request")


@dataclass(slots=True)
class Call:
    """One request from its arrival to its end. Times are from the monotonic clock, in seconds.

    ``prefill`` brings its prompt from another replica, ``is_aborted``: somebody asked for its end.
    """

    request: ReplicaRequest
    span: RequestSpan
    arrived_at: float = field(default_factory=time.perf_counter)
    generation: Generation | None = None
    first_token_at: float | None = None
    last_token_at: float = 0.0
    error: str | None = None
    ending: RecentUsage | None = None
    prefill: asyncio.Task[None] | None = None
    is_aborted: bool = False
    settled: asyncio.Event = field(default_factory=asyncio.Event)


class Calls:
    """All calls of one replica.

    Args:
        usages: where the ends go.
        metrics: what counts them.
    """

    def __init__(self, usages: RecentUsageLog, metrics: ReplicaMetrics) -> None:
        self._usages = usages
        self._metrics = metrics
        self._calls: dict[str, Call] = {}
        self._settling: set[asyncio.Task[None]] = set()
        self._idle = asyncio.Event()
        self._idle.set()

    @property
    def num_open(self) -> int:
        return len(self._calls)

    def open(self, request: ReplicaRequest, span: RequestSpan, max_open: int) -> Call:
        """Take in a request.

        Raises:
            ReplicaError: when there are ``max_open`` already, or one with the same id.
        """
        if request.request_id in self._calls:
            raise duplicate_request(request.request_id)
        if len(self._calls) >= max_open:
            raise refused("queue_full", f"{len(self._calls)} requests are running or waiting already")
        call = Call(request, span)
        self._calls[request.request_id] = call
        self._idle.clear()
        return call

    async def next(self, call: Call) -> Delta:
        """The next delta of a call's generation, with its time taken.

        Raises: as :meth:`Generation.next`.
        """
        assert call.generation is not None
        delta = await call.generation.next()
        if not delta.num_tokens:
            return delta
        now = time.perf_counter()
        if call.last_token_at:
            self._metrics.inter_token.observe(now - call.last_token_at)
        call.last_token_at = now
        # The first token is the first that a reader sees something of: held-back text is no answer yet.
        if call.first_token_at is None and delta.is_visible:
            call.first_token_at = now
            self._metrics.first_token.observe(now - call.arrived_at)
        return delta

    def finish(self, call: Call, reason: FinishReason | None = None) -> TokenUsage:
        """Record how a call ended; its counts must be final. The first ending is the one that counts.

        Args:
            call: one whose generation began.
            reason: how it ended, if not as its generation says.
        """
        if call.ending is None:
            assert call.generation is not None
            usage = call.generation.usage
            reason = reason or call.generation.finish_reason
            request = call.request
            call.ending = self._usages.record(request.request_id, request.billing_context, usage, reason)
            self._metrics.count_end(usage, reason)
        return call.ending.usage

    def close(self, call: Call) -> None:
        """Let go of a call, however it went: what still runs is stopped, and recorded when it has."""
        if call.generation is None or call.ending is not None:
            self._forget(call)
            return
        task = asyncio.create_task(self._settle(call, call.generation))
        self._settling.add(task)
        task.add_done_callback(self._settling.discard)

    async def abort(self, request_id: str) -> RecentUsage | None:
        """Stop a request and wait for its end. Does nothing to one that is over or unknown."""
        call = self._calls.get(request_id)
        if call is not None:
            call.is_aborted = True
            if call.prefill is not None:
                call.prefill.cancel()
            if call.generation is not None:
                call.generation.abort()
            try:
                async with asyncio.timeout(_SETTLE_TIMEOUT_S):
                    await call.settled.wait()
            except TimeoutError:
                return None
        return self._usages.find(request_id)

    async def wait_idle(self) -> None:
        """Until no call is open."""
        await self._idle.wait()

    async def wait_settled(self) -> None:
        """Until everything that is being stopped has been recorded."""
        if self._settling:
            await asyncio.wait(self._settling)

    async def _settle(self, call: Call, generation: Generation) -> None:
        await generation.settle(_SETTLE_TIMEOUT_S)
        self.finish(call, "abort" if call.error is None else "error")
        self._forget(call)

    def _forget(self, call: Call) -> None:
        del self._calls[call.request.request_id]
        call.settled.set()
        if not self._calls:
            self._idle.set()
        self._report(call)

    def _report(self, call: Call) -> None:
        """Span, histograms and one log line. Never what was said, only how much and how long."""
        duration_s = time.perf_counter() - call.arrived_at
        first_token_s = None if call.first_token_at is None else call.first_token_at - call.arrived_at
        usage = None if call.ending is None else call.ending.usage
        generation = call.generation
        reasons = [] if generation is None else generation.finish_reasons
        call.span.end(usage, reasons, error=call.error, first_token_s=first_token_s, duration_s=duration_s)
        if generation is not None and usage is not None:
            self._metrics.end_to_end.observe(duration_s)
            self._metrics.queue.observe(generation.queue_wait_s)
            if first_token_s is not None and usage.completion_tokens > 1:
                per_token_s = (duration_s - first_token_s) / (usage.completion_tokens - 1)
                self._metrics.per_output_token.observe(per_token_s)
        _log.info("request", extra={"fields": _log_fields(call, usage, first_token_s, duration_s)})


def _log_fields(
    call: Call, usage: TokenUsage | None, first_token_s: float | None, duration_s: float
) -> dict[str, object]:
    request = call.request
    fields: dict[str, object] = {"request_id": request.request_id}
    if request.account_id:
        fields["account"] = request.account_id
    fields |= {"model": request.model, "stream": request.stream}
    if call.error is not None:
        fields["error"] = call.error
    if call.ending is not None and usage is not None:
        fields["finish_reason"] = call.ending.finish_reason
        fields["prompt_tokens"] = usage.prompt_tokens
        fields["cached_prompt_tokens"] = usage.cached_prompt_tokens
        fields["completion_tokens"] = usage.completion_tokens
    if first_token_s is not None:
        fields["ttft_ms"] = round(first_token_s * 1000, 3)
    fields["duration_ms"] = round(duration_s * 1000, 3)
    return fields


def error_word(error: BaseException) -> str:
    """One stable word for what ended a call, for spans and log lines."""
    return error.detail.code or "error" if isinstance(error, ReplicaError) else type(error).__name__
