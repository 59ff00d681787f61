"""What the edge says about its requests: metrics always, an access line when asked for, spans when
exported.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from functools import partial
from typing import Protocol

from msgspec import UNSET

from billing.usage import UsageRecord
from gateway.call import Call
from gateway.errors import Reason
from gateway.logs import AccessLine, AccessLog, timestamp
from gateway.metrics import GatewayMetrics

OutboundHeaders = tuple[tuple[str, str], ...]


class RequestTracing(Protocol):
    """Spans of requests; see :mod:`gateway.tracing`."""

    def start(self, call: Call) -> None: ...

    def outbound_headers(self, call: Call) -> OutboundHeaders: ...

    def end(self, call: Call, duration_s: float) -> None: ...

    def shutdown(self) -> None: ...


class Telemetry:
    """Observes calls from admission to their end. Knows tokens by number only."""

    def __init__(
        self,
        metrics: GatewayMetrics,
        access_log: AccessLog | None,
        tracing: RequestTracing | None,
        clock: Callable[[], float],
    ) -> None:
        self.metrics = metrics
        self._access_log = access_log
        self._tracing = tracing
        self._clock = clock

    def started(self, call: Call) -> None:
        self.metrics.num_in_flight += 1
        if self._tracing is not None:
            self._tracing.start(call)

    def outbound_headers(self, call: Call) -> OutboundHeaders:
        """Trace headers for the replica. Without tracing here, the client's own trace still reaches it."""
        if self._tracing is not None:
            return self._tracing.outbound_headers(call)
        headers = call.exchange.headers
        traceparent = headers.get("traceparent")
        if traceparent is None:
            return ()
        tracestate = headers.get("tracestate")
        trace = ("traceparent", traceparent)
        return (trace,) if tracestate is None else (trace, ("tracestate", tracestate))

    def refused(self, reason: Reason) -> None:
        if reason.status == 429:
            self.metrics.count_rate_limited(reason.word)

    def ended(self, call: Call) -> None:
        """The call's exchange was answered and its record, if any, made."""
        duration_s = self._clock() - call.started_at
        metrics, record = self.metrics, call.record
        metrics.num_in_flight -= 1
        metrics.count_request(call.surface.name, call.model_id, call.http_status)
        if record is not None:
            metrics.count_record(record, call.charge, call.predicted_cached_tokens)
        if self._tracing is not None:
            self._tracing.end(call, duration_s)
        if self._access_log is not None:
            self._access_log.add(_access_line(call, duration_s))

    def close(self) -> None:
        """Write and export what waits. Blocking."""
        if self._access_log is not None:
            self._access_log.close()
        if self._tracing is not None:
            self._tracing.shutdown()


def _access_line(call: Call, duration_s: float) -> Callable[[], AccessLine]:
    """Makes the line, later and elsewhere. Keeps nothing of the call but its record."""
    now, record, reason = time.time(), call.record, call.refused_for
    if record is None:
        of_call = (call.request_id, call.account_id[:64], call.surface.name, call.http_status, call.model_id)
        return partial(_line_of_refusal, now, *of_call, reason, duration_s)
    return partial(_line_of_record, now, record, call.http_status, reason, duration_s)


def _line_of_refusal(
    now: float,
    request_id: str,
    account: str,
    surface: str,
    status: int,
    model: str,
    reason: str,
    duration_s: float,
) -> AccessLine:
    return AccessLine(
        time=timestamp(now),
        request_id=request_id,
        account=account,
        surface=surface,
        status=status,
        model=model or UNSET,
        reason=reason or UNSET,
        duration_ms=round(duration_s * 1000, 3),
    )


def _line_of_record(
    now: float, record: UsageRecord, status: int, reason: str, duration_s: float
) -> AccessLine:
    return AccessLine(
        time=timestamp(now),
        request_id=record.request_id,
        account=record.account_id,
        surface=record.surface,
        status=status,
        model=record.model,
        requested_model=record.requested_model,
        outcome=record.status,
        reason=reason or UNSET,
        replica=record.replica_id,
        num_attempts=record.num_attempts,
        prompt_tokens=record.prompt_tokens,
        cached_prompt_tokens=record.cached_prompt_tokens,
        completion_tokens=record.completion_tokens,
        ttft_ms=record.ttft_us / 1000 if record.ttft_us else UNSET,
        duration_ms=round(duration_s * 1000, 3),
    )
