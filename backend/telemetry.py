"""Traces, ``gen_ai.server.*`` histograms and log lines of a replica.

The gateway's trace goes on here: one span per request, begun when the request has been read and ended with
the last byte or the abort. Without an OTLP endpoint nothing is built and nothing is paid. No span and no
log line holds a prompt, a token or an answer.
"""

from __future__ import annotations

import json
import logging
import sys
import time
from collections.abc import Mapping
from typing import Any, Final, Protocol

from opentelemetry.metrics import Histogram
from opentelemetry.sdk.metrics import MeterProvider
from opentelemetry.sdk.metrics.export import MetricReader
from opentelemetry.sdk.resources import Resource
from opentelemetry.sdk.trace import SpanProcessor, TracerProvider
from opentelemetry.trace import Span, SpanKind, Status, StatusCode
from opentelemetry.trace.propagation.tracecontext import TraceContextTextMapPropagator

from backend.config import BackendConfig
from backend.wire import FinishReason, ReplicaRequest, TokenUsage

_OPERATION: Final = "chat"
_PROVIDER: Final = "embergate"
# Advised by the semantic conventions for each of the three.
_DURATION_BOUNDS: Final = (
    0.01, 0.02, 0.04, 0.08, 0.16, 0.32, 0.64, 1.28, 2.56, 5.12, 10.24, 20.48, 40.96, 81.92,
)  # fmt: skip
_FIRST_TOKEN_BOUNDS: Final = (
    0.001, 0.005, 0.01, 0.02, 0.04, 0.06, 0.08, 0.1, 0.25, 0.5, 0.75, 1.0, 2.5, 5.0, 7.5, 10.0,
)  # fmt: skip
_PER_TOKEN_BOUNDS: Final = (0.01, 0.025, 0.05, 0.075, 0.1, 0.15, 0.2, 0.3, 0.4, 0.5, 0.75, 1.0, 2.5)


class RequestSpan(Protocol):
    """The trace of one request; :meth:`end` is called once."""

    def end(
        self,
        usage: TokenUsage | None,
        finish_reasons: list[FinishReason],
        *,
        error: str | None,
        first_token_s: float | None,
        duration_s: float,
    ) -> None: ...


class Telemetry(Protocol):
    def start_request(self, request: ReplicaRequest, headers: Mapping[str, str]) -> RequestSpan: ...

    def shutdown(self) -> None: ...


class NoTelemetry:
    """Nothing is traced."""

    def start_request(self, request: ReplicaRequest, headers: Mapping[str, str]) -> RequestSpan:
        return _NO_SPAN

    def shutdown(self) -> None:
        return


class _NoSpan:
    def end(
        self,
        usage: TokenUsage | None,
        finish_reasons: list[FinishReason],
        *,
        error: str | None,
        first_token_s: float | None,
        duration_s: float,
    ) -> None:
        return


_NO_SPAN: Final = _NoSpan()


class OpenTelemetry:
    """Spans and histograms for the given processors and readers.

    Args:
        config: names the service and the replica.
        span_processor: where spans go.
        metric_reader: where histograms go.
    """

    def __init__(
        self, config: BackendConfig, span_processor: SpanProcessor, metric_reader: MetricReader
    ) -> None:
        resource = Resource.create(
            {"service.name": config.telemetry.service_name, "service.instance.id": config.replica_id}
        )
        self._traces = TracerProvider(resource=resource)
        self._traces.add_span_processor(span_processor)
        self._metrics = MeterProvider([metric_reader], resource=resource)
        self._tracer = self._traces.get_tracer("embergate.backend")
        self._propagator = TraceContextTextMapPropagator()
        self._address: dict[str, str | int] = {"server.address": config.host, "server.port": config.port}
        meter = self._metrics.get_meter("embergate.backend")
        self._durations = meter.create_histogram(
            "gen_ai.server.request.duration", "s", explicit_bucket_boundaries_advisory=_DURATION_BOUNDS
        )
        self._first_tokens = meter.create_histogram(
            "gen_ai.server.time_to_first_token", "s", explicit_bucket_boundaries_advisory=_FIRST_TOKEN_BOUNDS
        )
        self._per_token = meter.create_histogram(
            "gen_ai.server.time_per_output_token", "s", explicit_bucket_boundaries_advisory=_PER_TOKEN_BOUNDS
        )

    def start_request(self, request: ReplicaRequest, headers: Mapping[str, str]) -> RequestSpan:
        """Begin a request's span as a child of the gateway's, whose ``traceparent`` is in the headers."""
        carrier = {name: headers[name] for name in ("traceparent", "tracestate") if name in headers}
        span = self._tracer.start_span(
            f"{_OPERATION} {request.model}",
            context=self._propagator.extract(carrier),
            kind=SpanKind.SERVER,
            attributes=_request_attributes(request) | self._address,
        )
        return _TracedRequest(span, request.model, self._durations, self._first_tokens, self._per_token)

    def shutdown(self) -> None:
        """Send what waits. Blocks for the exporter's timeout at most."""
        self._traces.shutdown()
        self._metrics.shutdown()


def build_telemetry(config: BackendConfig) -> Telemetry:
    """OTLP over HTTP when an endpoint is configured, else nothing."""
    endpoint = config.telemetry.otlp_endpoint.rstrip("/")
    if not endpoint:
        return NoTelemetry()
    # Imported here because a replica without an endpoint need not pay for the exporters.
    from opentelemetry.exporter.otlp.proto.http.metric_exporter import OTLPMetricExporter
    from opentelemetry.exporter.otlp.proto.http.trace_exporter import OTLPSpanExporter
    from opentelemetry.sdk.metrics.export import PeriodicExportingMetricReader
    from opentelemetry.sdk.trace.export import BatchSpanProcessor

    return OpenTelemetry(
        config,
        BatchSpanProcessor(OTLPSpanExporter(endpoint=f"{endpoint}/v1/traces")),
        PeriodicExportingMetricReader(OTLPMetricExporter(endpoint=f"{endpoint}/v1/metrics")),
    )


class _TracedRequest:
    def __init__(
        self, span: Span, model: str, durations: Histogram, first_tokens: Histogram, per_token: Histogram
    ) -> None:
        self._span = span
        self._model = model
        self._durations = durations
        self._first_tokens = first_tokens
        self._per_token = per_token

    def end(
        self,
        usage: TokenUsage | None,
        finish_reasons: list[FinishReason],
        *,
        error: str | None,
        first_token_s: float | None,
        duration_s: float,
    ) -> None:
        span = self._span
        if usage is not None:
            span.set_attributes(_usage_attributes(usage))
        span.set_attribute("gen_ai.response.finish_reasons", finish_reasons)
        if first_token_s is not None:
            span.set_attribute("gen_ai.response.time_to_first_chunk", first_token_s)
        labels: dict[str, str] = {
            "gen_ai.operation.name": _OPERATION,
            "gen_ai.provider.name": _PROVIDER,
            "gen_ai.request.model": self._model,
            "gen_ai.response.model": self._model,
        }
        if error is not None:
            span.set_attribute("error.type", error)
            span.set_status(Status(StatusCode.ERROR))
            labels["error.type"] = error
        span.end()
        self._durations.record(duration_s, labels)
        if error is None and first_token_s is not None and usage is not None:
            self._first_tokens.record(first_token_s, labels)
            if usage.completion_tokens > 1:
                self._per_token.record((duration_s - first_token_s) / (usage.completion_tokens - 1), labels)


def _request_attributes(request: ReplicaRequest) -> dict[str, Any]:
    attributes: dict[str, Any] = {
        "gen_ai.operation.name": _OPERATION,
        "gen_ai.provider.name": _PROVIDER,
        "gen_ai.request.model": request.model,
        "gen_ai.response.model": request.model,
        "gen_ai.response.id": f"chatcmpl-{request.request_id}",
        "gen_ai.output.type": "text",
        "gen_ai.request.stream": request.stream,
        "gen_ai.request.temperature": request.temperature,
        "gen_ai.request.top_p": request.top_p,
        "embergate.request_id": request.request_id,
    }
    optional = {
        "gen_ai.request.max_tokens": request.max_tokens,
        "gen_ai.request.top_k": request.top_k or None,
        "gen_ai.request.seed": request.seed,
        "gen_ai.request.choice.count": request.n if request.n > 1 else None,
    }
    attributes.update({name: value for name, value in optional.items() if value is not None})
    return attributes


def _usage_attributes(usage: TokenUsage) -> dict[str, int]:
    return {
        "gen_ai.usage.input_tokens": usage.prompt_tokens,
        "gen_ai.usage.cache_read.input_tokens": usage.cached_prompt_tokens,
        "gen_ai.usage.output_tokens": usage.completion_tokens,
        "gen_ai.usage.reasoning.output_tokens": usage.completion_tokens_details.reasoning_tokens,
    }


class JsonLogFormatter(logging.Formatter):
    """One JSON object a line: time, level, message, and what was given as ``extra={"fields": ...}``."""

    def __init__(self, replica_id: str) -> None:
        super().__init__()
        self._replica_id = replica_id

    def format(self, record: logging.LogRecord) -> str:
        moment = time.strftime("%Y-%m-%dT%H:%M:%S", time.gmtime(record.created))
        entry: dict[str, Any] = {
            "time": f"{moment}.{int(record.msecs):03d}Z",
            "level": record.levelname.lower(),
            "logger": record.name,
            "message": record.getMessage(),
            "replica": self._replica_id,
            **getattr(record, "fields", {}),
        }
        if record.exc_info:
            entry["exception"] = self.formatException(record.exc_info)
        return json.dumps(entry, ensure_ascii=False, separators=(",", ":"))


def configure_logging(replica_id: str, level: str) -> None:
    """Send this process's log lines to standard error. For the composition root only."""
    handler = logging.StreamHandler(sys.stderr)
    handler.setFormatter(JsonLogFormatter(replica_id))
    logging.basicConfig(level=level.upper(), handlers=[handler], force=True)
