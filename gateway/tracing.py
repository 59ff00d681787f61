"""OpenTelemetry: one span ``chat {model}`` per request and the ``gen_ai.server.*`` histograms.

Imported only when an OTLP endpoint is configured; without one nothing of this is paid for. A span begins at
admission and ends with the stream, however it ends; the trace of the caller (W3C ``traceparent``) goes on
through it to the replica.
"""

from __future__ import annotations

from opentelemetry.exporter.otlp.proto.http.metric_exporter import OTLPMetricExporter
from opentelemetry.exporter.otlp.proto.http.trace_exporter import OTLPSpanExporter
from opentelemetry.metrics import MeterProvider as AnyMeterProvider
from opentelemetry.sdk.metrics import MeterProvider
from opentelemetry.sdk.metrics.export import PeriodicExportingMetricReader
from opentelemetry.sdk.resources import Resource
from opentelemetry.sdk.trace import TracerProvider
from opentelemetry.sdk.trace.export import BatchSpanProcessor
from opentelemetry.trace import SpanKind, Status, StatusCode, set_span_in_context
from opentelemetry.trace import TracerProvider as AnyTracerProvider
from opentelemetry.trace.propagation.tracecontext import TraceContextTextMapPropagator
from opentelemetry.util.types import AttributeValue

from gateway.call import Call
from gateway.config import TelemetryConfig
from gateway.wire.embeddings import EmbeddingsRequest
from gateway.wire.openai import ChatRequest

_SCOPE = "embergate.gateway"
_PROVIDER = "embergate"
_MICROS = 1_000_000


class Tracing:
    """Spans and histograms of requests. ``Call.span`` is its to use."""

    def __init__(self, tracers: AnyTracerProvider, meters: AnyMeterProvider) -> None:
        self._tracers = tracers
        self._meters = meters
        self._tracer = tracers.get_tracer(_SCOPE)
        self._propagator = TraceContextTextMapPropagator()
        meter = meters.get_meter(_SCOPE)
        self._duration = meter.create_histogram(
            "gen_ai.server.request.duration", "s", "Duration of a request."
        )
        self._ttft = meter.create_histogram(
            "gen_ai.server.time_to_first_token", "s", "Time to the first token."
        )
        self._tpot = meter.create_histogram(
            "gen_ai.server.time_per_output_token", "s", "Time per token after the first."
        )

    def start(self, call: Call) -> None:
        """Begin the call's span, inside the trace that the client named, if any."""
        context = self._propagator.extract(dict(call.exchange.headers))
        call.span = self._tracer.start_span(
            "chat", context, kind=SpanKind.CLIENT, start_time=call.started_at_us * 1000
        )

    def outbound_headers(self, call: Call) -> tuple[tuple[str, str], ...]:
        """``traceparent`` and ``tracestate`` for the replica."""
        carrier: dict[str, str] = {}
        self._propagator.inject(carrier, set_span_in_context(call.span))
        return tuple(carrier.items())

    def end(self, call: Call, duration_s: float) -> None:
        """End the span with what is known now, and observe the histograms."""
        span = call.span
        attributes = _attributes(call)
        error_type = call.refused_for or _error_of(call)
        if error_type:
            attributes["error.type"] = error_type
            span.set_status(Status(StatusCode.ERROR))
        operation = _operation(call)
        span.update_name(f"{operation} {call.model_id}" if call.model_id else operation)
        span.set_attributes(attributes)
        span.end()
        self._observe(call, duration_s, error_type)

    def shutdown(self) -> None:
        """Export what waits. Blocking."""
        for provider in (self._tracers, self._meters):
            if isinstance(provider, TracerProvider | MeterProvider):
                provider.shutdown()

    def _observe(self, call: Call, duration_s: float, error_type: str) -> None:
        labels: dict[str, AttributeValue] = {
            "gen_ai.operation.name": _operation(call),
            "gen_ai.provider.name": _PROVIDER,
            "gen_ai.response.model": call.model_id,
        }
        if error_type:
            self._duration.record(duration_s, labels | {"error.type": error_type})
            return
        self._duration.record(duration_s, labels)
        record = call.record
        if record is None or not record.ttft_us:
            return
        self._ttft.record(record.ttft_us / _MICROS, labels)
        if call.request.is_stream and record.completion_tokens > 1:
            rest_s = (record.finished_at_us - record.started_at_us - record.ttft_us) / _MICROS
            self._tpot.record(rest_s / (record.completion_tokens - 1), labels)


def tracing_from_config(config: TelemetryConfig) -> Tracing:
    """Exports to ``otlp_endpoint`` over HTTP, in batches and in background threads."""
    endpoint = config.otlp_endpoint.rstrip("/")
    resource = Resource.create({"service.name": config.service_name})
    tracers = TracerProvider(resource=resource)
    tracers.add_span_processor(BatchSpanProcessor(OTLPSpanExporter(endpoint=f"{endpoint}/v1/traces")))
    reader = PeriodicExportingMetricReader(OTLPMetricExporter(endpoint=f"{endpoint}/v1/metrics"))
    return Tracing(tracers, MeterProvider(resource=resource, metric_readers=[reader]))


def _operation(call: Call) -> str:
    """The request may not have been decoded."""
    is_embedding = call.model_id and isinstance(call.request, EmbeddingsRequest)
    return "embeddings" if is_embedding else "chat"


def _error_of(call: Call) -> str:
    record = call.record
    return "" if record is None or record.status == "ok" else record.status


def _attributes(call: Call) -> dict[str, AttributeValue]:
    attributes: dict[str, AttributeValue] = {
        "gen_ai.operation.name": _operation(call),
        "gen_ai.provider.name": _PROVIDER,
        "embergate.request_id": call.request_id,
        "embergate.account_id": call.account_id,
    }
    if call.model_id:
        attributes |= _request_attributes(call)
    if call.session:
        attributes["gen_ai.conversation.id"] = call.session
    if call.finish_reasons:
        attributes["gen_ai.response.finish_reasons"] = call.finish_reasons
    record = call.record
    if record is not None:
        attributes["gen_ai.response.model"] = record.model
        attributes["gen_ai.usage.input_tokens"] = record.prompt_tokens
        attributes["gen_ai.usage.cache_read.input_tokens"] = record.cached_prompt_tokens
        attributes["gen_ai.usage.output_tokens"] = record.completion_tokens
        attributes["gen_ai.usage.reasoning.output_tokens"] = record.reasoning_tokens
        attributes["embergate.replica_id"] = record.replica_id
        if call.prefill_id:
            attributes["embergate.prefill_replica_id"] = call.prefill_id
        if record.ttft_us:
            attributes["gen_ai.response.time_to_first_chunk"] = record.ttft_us / _MICROS
    return attributes


def _request_attributes(call: Call) -> dict[str, AttributeValue]:
    request = call.request
    attributes: dict[str, AttributeValue] = {
        "gen_ai.request.model": request.model,
        "gen_ai.request.stream": request.is_stream,
    }
    return attributes | _sampling_attributes(request) if isinstance(request, ChatRequest) else attributes


def _sampling_attributes(chat: ChatRequest) -> dict[str, AttributeValue]:
    body = chat.body
    optional: dict[str, AttributeValue | None] = {
        "gen_ai.request.max_tokens": chat.max_tokens,
        "gen_ai.request.temperature": body.temperature,
        "gen_ai.request.top_p": body.top_p,
        "gen_ai.request.top_k": body.top_k,
        "gen_ai.request.seed": body.seed,
        "gen_ai.request.stop_sequences": chat.stop or None,
        "gen_ai.request.choice.count": chat.num_choices if chat.num_choices > 1 else None,
    }
    return {name: value for name, value in optional.items() if value is not None}
