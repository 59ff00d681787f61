"""Metrics, spans, logs and probes of a gateway that serves."""

from __future__ import annotations

import asyncio
import json
import logging
from collections.abc import Awaitable, Callable

import pytest
from aiohttp import web
from blockbuster import blockbuster_ctx
from opentelemetry.sdk.metrics import MeterProvider
from opentelemetry.sdk.metrics.export import InMemoryMetricReader
from opentelemetry.sdk.trace import ReadableSpan, TracerProvider
from opentelemetry.sdk.trace.export import SimpleSpanProcessor
from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter
from opentelemetry.trace import StatusCode

from gateway.config import TelemetryConfig
from gateway.tracing import Tracing
from tests.support.fake_replica import FakeReplica
from tests.support.gateway_harness import ACCOUNT, ALIAS, MODEL, TOKEN, Harness, gateway_config
from tests.support.waiting import eventually

RUN = f"/run/{MODEL}"
StartGateway = Callable[..., Awaitable[Harness]]


async def metric(gateway: Harness, name: str) -> float:
    reply = await gateway.get(gateway.root("/metrics"), token=None)
    assert reply.status == 200
    assert reply.headers["content-type"].startswith("text/plain")
    for line in reply.body.decode().splitlines():
        if line.startswith(name + " "):
            return float(line.rsplit(" ", 1)[1])
    raise AssertionError(f"{name} is not among the metrics")


async def test_metrics_count_requests_tokens_and_spend(gateway: Harness) -> None:
    await gateway.chat(path=RUN, stream=True)
    await gateway.chat(n=0)
    labels = f'{{account="{ACCOUNT}",model="{MODEL}"}}'
    assert await metric(gateway, f"litellm_input_tokens_metric_total{labels}") == 12
    assert await metric(gateway, f"litellm_input_cached_tokens_metric_total{labels}") == 4
    assert await metric(gateway, f"litellm_output_tokens_metric_total{labels}") == 3
    spend = await metric(gateway, f"litellm_spend_metric_total{labels}")
    assert spend == pytest.approx(0.0000142)
    assert (
        await metric(gateway, f'smg_http_requests_total{{model="{MODEL}",status="200",surface="run"}}') == 1
    )
    assert await metric(gateway, 'smg_http_requests_total{model="",status="400",surface="v1"}') == 1
    assert await metric(gateway, 'smg_worker_health{worker="replica-0"}') == 1
    assert await metric(gateway, 'embergate_usage_records_total{estimated="false",status="ok"}') == 1
    assert await metric(gateway, "embergate_metering_committed_records_total") == 1
    assert await metric(gateway, "litellm_in_flight_requests") == 0


async def test_predicted_cached_tokens_are_a_metric(gateway: Harness, replicas: list[FakeReplica]) -> None:
    for _ in range(3):
        await gateway.chat(headers={"x-session-affinity": "ses_1"})
    assert await metric(gateway, f'embergate_predicted_cached_tokens_total{{model="{MODEL}"}}') == 24
    assert await metric(gateway, f'embergate_cache_mispredictions_total{{model="{MODEL}"}}') == 2


async def test_accounts_beyond_the_bound_count_as_other(start_gateway: StartGateway) -> None:
    telemetry = TelemetryConfig(access_log=False, max_account_labels=0)
    gateway = await start_gateway(gateway_config(telemetry=telemetry))
    await gateway.chat()
    assert (
        await metric(gateway, f'litellm_input_tokens_metric_total{{account="other",model="{MODEL}"}}') == 12
    )


async def test_health_and_readiness(gateway: Harness, replicas: list[FakeReplica]) -> None:
    assert (await gateway.get(gateway.root("/health"), token=None)).status == 200
    ready = await gateway.get(gateway.root("/ready"), token=None)
    assert ready.status == 200
    assert ready.json["replicas"]["replica-0"]["health"] == "ready"
    for replica in replicas:
        await replica.stop()
    await eventually(lambda: all(gateway.health_of(replica) != "ready" for replica in replicas))
    assert (await gateway.get(gateway.root("/ready"), token=None)).status == 503
    assert (await gateway.get(gateway.root("/health"), token=None)).status == 200


class Spans:
    """Tracing into memory."""

    def __init__(self) -> None:
        self.exporter = InMemorySpanExporter()
        tracers = TracerProvider()
        tracers.add_span_processor(SimpleSpanProcessor(self.exporter))
        self.reader = InMemoryMetricReader()
        self.tracing = Tracing(tracers, MeterProvider(metric_readers=[self.reader]))

    async def one(self) -> ReadableSpan:
        """The only span, when it has ended."""
        await eventually(lambda: bool(self.exporter.get_finished_spans()))
        (span,) = self.exporter.get_finished_spans()
        return span


async def test_a_streams_span_ends_with_the_stream_and_has_its_usage(
    start_gateway: StartGateway, replicas: list[FakeReplica]
) -> None:
    """BR-102, BR-104: current attribute names; the caller's trace goes on to the replica."""
    spans = Spans()
    gateway = await start_gateway(tracing=spans.tracing)
    for replica in replicas:
        replica.script.token_delay_s = 0.05
    trace_id, parent_id = "0af7651916cd43dd8448eb211c80319c", "b7ad6b7169203331"
    await gateway.chat(
        path=f"/run/{ALIAS}",
        stream=True,
        max_tokens=9,
        temperature=0.5,
        headers={"traceparent": f"00-{trace_id}-{parent_id}-01", "x-session-affinity": "ses_1"},
    )
    span = await spans.one()
    assert span.name == f"chat {MODEL}"
    attributes = dict(span.attributes or {})
    expected = {
        "gen_ai.operation.name": "chat",
        "gen_ai.provider.name": "embergate",
        "gen_ai.request.model": ALIAS,
        "gen_ai.response.model": MODEL,
        "gen_ai.request.max_tokens": 9,
        "gen_ai.request.temperature": 0.5,
        "gen_ai.request.stream": True,
        "gen_ai.conversation.id": "ses_1",
        "gen_ai.response.finish_reasons": ("stop",),
        "gen_ai.usage.input_tokens": 12,
        "gen_ai.usage.cache_read.input_tokens": 4,
        "gen_ai.usage.output_tokens": 3,
    }
    assert {name: attributes.get(name) for name in expected} == expected
    assert "gen_ai.usage.prompt_tokens" not in attributes
    assert "error.type" not in attributes
    assert span.end_time is not None
    assert span.start_time is not None
    assert span.end_time - span.start_time > 0.15e9
    assert format(span.context.trace_id, "032x") == trace_id
    assert span.parent is not None
    assert format(span.parent.span_id, "016x") == parent_id
    (headers,) = replicas[0].headers + replicas[1].headers
    assert headers["traceparent"] == f"00-{trace_id}-{span.context.span_id:016x}-01"
    data = spans.reader.get_metrics_data()
    assert data is not None
    names = {
        one.name
        for resource in data.resource_metrics
        for scope in resource.scope_metrics
        for one in scope.metrics
    }
    assert names == {
        "gen_ai.server.request.duration",
        "gen_ai.server.time_to_first_token",
        "gen_ai.server.time_per_output_token",
    }


async def test_a_broken_streams_span_ends_with_its_error(
    start_gateway: StartGateway, replicas: list[FakeReplica]
) -> None:
    spans = Spans()
    gateway = await start_gateway(tracing=spans.tracing)
    for replica in replicas:
        replica.script.die_after = 2
    await gateway.chat(stream=True)
    span = await spans.one()  # the replica is asked once more for what it remembers
    attributes = dict(span.attributes or {})
    assert attributes["error.type"] == "worker_lost"
    assert attributes["gen_ai.usage.output_tokens"] == 2
    assert span.status.status_code is StatusCode.ERROR


async def test_a_refusals_span_names_it(start_gateway: StartGateway) -> None:
    spans = Spans()
    gateway = await start_gateway(tracing=spans.tracing)
    await gateway.chat(n=0)
    assert dict((await spans.one()).attributes or {})["error.type"] == "bad_input"


async def test_access_lines_hold_ids_and_counts_but_no_text_and_no_token(
    start_gateway: StartGateway,
    replicas: list[FakeReplica],
    capfdbinary: pytest.CaptureFixture[bytes],
    caplog: pytest.LogCaptureFixture,
) -> None:
    caplog.set_level(logging.DEBUG)
    gateway = await start_gateway(gateway_config(telemetry=TelemetryConfig(access_log=True)))
    for replica in replicas:
        replica.script.tokens = ["SECRETANSWER"]
    messages = [{"role": "user", "content": "SECRETPROMPT"}]
    reply = await gateway.chat(messages=messages, stream=True)
    await gateway.chat(messages=messages, n=0)
    await gateway.chat(messages=messages, token="SECRETTOKEN")
    await gateway.stop()
    text = capfdbinary.readouterr().err.decode() + caplog.text
    for secret in ("SECRETANSWER", "SECRETPROMPT", "SECRETTOKEN", TOKEN):
        assert secret not in text
    lines = [json.loads(line) for line in text.splitlines() if '"message":"request"' in line]
    assert [line["status"] for line in lines] == [200, 400, 401]
    assert lines[0]["request_id"] == reply.headers["cf-ai-req-id"]
    assert lines[0]["account"] == ACCOUNT
    counts = [lines[0][f"{name}_tokens"] for name in ("prompt", "cached_prompt", "completion")]
    assert counts == [12, 4, 1]
    assert {request["account_id"] for replica in replicas for request in replica.requests} == {ACCOUNT}
    assert lines[1]["reason"] == "bad_input"


async def test_access_lines_are_of_the_level_info(
    start_gateway: StartGateway, capfdbinary: pytest.CaptureFixture[bytes]
) -> None:
    telemetry = TelemetryConfig(access_log=True, log_level="warning")
    gateway = await start_gateway(gateway_config(telemetry=telemetry))
    assert (await gateway.chat()).status == 200
    await gateway.stop()
    assert b'"message":"request"' not in capfdbinary.readouterr().err


async def test_nothing_blocks_the_event_loop(
    start_gateway: StartGateway, replicas: list[FakeReplica]
) -> None:
    """Blocking calls out of the gateway's code raise inside this block, and would show as 500s."""
    gateway = await start_gateway(gateway_config(telemetry=TelemetryConfig(access_log=True)))
    with blockbuster_ctx("gateway"):
        for path in (RUN, "/v1/chat/completions"):
            assert (await gateway.chat(path=path, stream=True)).frames[-1] == "[DONE]"
            assert (await gateway.chat(path=path)).status == 200
        assert (await gateway.chat(n=0)).status == 400
        assert (await gateway.chat(token="nobody's")).status == 401
        for path in ("/metrics", "/ready", "/health"):
            assert (await gateway.get(gateway.root(path), token=None)).status == 200
        assert (await gateway.get("/v1/models")).status == 200
        owner = next(replica for replica in replicas if replica.requests)
        owner.script.die_after = 1
        await gateway.chat(stream=True)
        await asyncio.sleep(0.2)


async def test_spans_and_histograms_are_exported_to_the_configured_endpoint(
    start_gateway: StartGateway,
) -> None:
    received: dict[str, bytes] = {}

    async def collect(request: web.Request) -> web.Response:
        received[request.path] = await request.read()
        return web.Response()

    app = web.Application()
    app.router.add_post("/{path:.*}", collect)
    runner = web.AppRunner(app)
    await runner.setup()
    await web.TCPSite(runner, "127.0.0.1", 0).start()
    endpoint = f"http://127.0.0.1:{runner.addresses[0][1]}/"
    telemetry = TelemetryConfig(access_log=False, otlp_endpoint=endpoint, service_name="edge-under-test")
    gateway = await start_gateway(gateway_config(telemetry=telemetry))
    await gateway.chat(stream=True)
    await gateway.stop()
    await runner.cleanup()
    assert set(received) == {"/v1/traces", "/v1/metrics"}
    assert b"edge-under-test" in received["/v1/traces"]
    assert f"chat {MODEL}".encode() in received["/v1/traces"]
    assert b"gen_ai.server.request.duration" in received["/v1/metrics"]
