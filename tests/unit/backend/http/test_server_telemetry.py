"""Figures, metrics, traces and log lines agree with what readers are told, and hold nothing that was said."""

from __future__ import annotations

import asyncio
import json
import logging
from typing import Any

import pytest
from opentelemetry.sdk.metrics.export import InMemoryMetricReader
from opentelemetry.sdk.trace import ReadableSpan
from opentelemetry.sdk.trace.export import SimpleSpanProcessor
from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter
from opentelemetry.trace import SpanKind, StatusCode

from backend.config import BackendConfig
from backend.telemetry import JsonLogFormatter, NoTelemetry, OpenTelemetry, build_telemetry
from tests.support.scripted_replica import Replica, StartReplica
from tests.support.waiting import eventually

TRACE_ID = "4bf92f3577b34da6a3ce929d0e0e4736"
PARENT = {"traceparent": f"00-{TRACE_ID}-00f067aa0ba902b7-01"}
SECRET = "a-word-that-nobody-may-log"


async def metric(replica: Replica, line: str) -> float:
    text = (await replica.call("GET", "/metrics")).body.decode()
    for found in text.splitlines():
        name, _, value = found.rpartition(" ")
        if name == line:
            return float(value)
    raise AssertionError(f"{line} is not in\n{text}")


def with_model(name: str, **labels: str) -> str:
    pairs = ",".join(
        f'{key}="{value}"' for key, value in sorted({"model_name": "@cf/test/model", **labels}.items())
    )
    return f"{name}{{{pairs}}}"


class TestMetrics:
    async def test_counters_are_the_sums_of_the_usages(self, replica: Replica) -> None:
        replica.say("hello", cached_prompt_tokens=16)
        usages = [(await replica.complete(stream=bool(i % 2))) for i in range(4)]
        whole = usages[0].json["usage"]
        assert await metric(replica, with_model("vllm:prompt_tokens_total")) == 4 * whole["prompt_tokens"]
        assert await metric(replica, with_model("vllm:prompt_tokens_cached_total")) == 4 * 16
        assert (
            await metric(replica, with_model("vllm:generation_tokens_total"))
            == 4 * whole["completion_tokens"]
        )
        assert await metric(replica, with_model("vllm:request_success_total", finished_reason="stop")) == 4
        for name in ("time_to_first_token", "e2e_request_latency", "request_queue_time"):
            assert await metric(replica, with_model(f"vllm:{name}_seconds_count")) == 4

    async def test_an_abort_counts_what_was_generated(self, replica: Replica) -> None:
        replica.say("abcdefghij" * 5, delay_s=0.01)
        task = asyncio.create_task(replica.complete())
        await eventually(lambda: replica.engine.num_open > 0)
        await asyncio.sleep(0.1)
        task.cancel()
        await eventually(lambda: replica.engine.num_open == 0)
        await asyncio.sleep(0.05)
        recorded = (await replica.usages())[0]["usage"]["completion_tokens"]
        assert await metric(replica, with_model("vllm:generation_tokens_total")) == recorded > 0
        assert await metric(replica, with_model("vllm:request_success_total", finished_reason="abort")) == 1

    async def test_the_engine_s_figures_are_read_when_asked(self, replica: Replica) -> None:
        for name, value in {
            "num_requests_running": 0,
            "num_requests_waiting": 0,
            "kv_cache_usage_perc": 8 / 64,
            "prefix_cache_queries_total": 100,
            "prefix_cache_hits_total": 32,
            "num_preemptions_total": 3,
            "spec_decode_num_draft_tokens_total": 40,
            "spec_decode_num_accepted_tokens_total": 30,
        }.items():
            assert await metric(replica, with_model(f"vllm:{name}")) == value

    async def test_refusals_are_counted_by_code(self, replica: Replica) -> None:
        await replica.complete(temperature=-1)
        line = with_model("vllm:admission_rejections_total", reason="invalid_value")
        assert await metric(replica, line) == 1

    async def test_no_label_comes_from_a_client(self, replica: Replica) -> None:
        replica.say("x")
        await replica.complete(model=SECRET, request_id=SECRET, billing_context=SECRET)
        await replica.call("GET", f"/{SECRET}")
        assert SECRET.encode() not in (await replica.call("GET", "/metrics")).body


async def test_stats_are_the_engine_s(replica: Replica) -> None:
    stats = (await replica.call("GET", "/stats")).json
    assert stats["replica_id"] == "replica-0"
    assert (stats["num_blocks"], stats["num_free_blocks"], stats["num_cached_blocks"]) == (64, 40, 16)
    assert (stats["block_size"], stats["max_model_len"]) == (16, 512)
    assert (stats["prompt_tokens"], stats["cached_prompt_tokens"], stats["completion_tokens"]) == (100, 32, 7)
    assert stats["started_at"] == (await replica.call("GET", "/usages")).json["started_at"]


class Traced:
    """A replica whose spans and histograms stay in memory."""

    def __init__(self, config: BackendConfig) -> None:
        self.exporter = InMemorySpanExporter()
        self.reader = InMemoryMetricReader()
        self.telemetry = OpenTelemetry(config, SimpleSpanProcessor(self.exporter), self.reader)

    async def span(self) -> ReadableSpan:
        await eventually(lambda: len(self.exporter.get_finished_spans()) == 1)
        return self.exporter.get_finished_spans()[0]

    def histograms(self) -> dict[str, Any]:
        data = self.reader.get_metrics_data()
        if data is None:
            return {}
        metrics = data.resource_metrics[0].scope_metrics[0].metrics
        return {m.name: m.data.data_points[0] for m in metrics}


@pytest.fixture
def traced(config: BackendConfig) -> Traced:
    return Traced(config)


class TestTraces:
    @pytest.mark.parametrize("stream", [True, False])
    async def test_the_gateway_s_trace_goes_on_and_has_the_counts(
        self, start_replica: StartReplica, traced: Traced, stream: bool
    ) -> None:
        replica = await start_replica(telemetry=traced.telemetry)
        replica.say("hello", cached_prompt_tokens=16)
        body = replica.request(stream=stream, request_id="r", top_k=5, seed=1)
        await replica.call("POST", "/v1/chat/completions", json=body, headers=PARENT)
        span = await traced.span()
        assert span.name == "chat @cf/test/model"
        assert span.kind is SpanKind.SERVER
        assert span.context is not None
        assert span.parent is not None
        assert format(span.context.trace_id, "032x") == TRACE_ID
        assert format(span.parent.span_id, "016x") == "00f067aa0ba902b7"
        usage = (await replica.usages())[0]["usage"]
        attributes = dict(span.attributes or {})
        for name, value in {
            "gen_ai.operation.name": "chat",
            "gen_ai.provider.name": "embergate",
            "gen_ai.request.model": "@cf/test/model",
            "gen_ai.response.model": "@cf/test/model",
            "gen_ai.response.id": "chatcmpl-r",
            "gen_ai.request.stream": stream,
            "gen_ai.request.max_tokens": 100,
            "gen_ai.request.top_k": 5,
            "gen_ai.request.seed": 1,
            "gen_ai.response.finish_reasons": ("stop",),
            "gen_ai.usage.input_tokens": usage["prompt_tokens"],
            "gen_ai.usage.cache_read.input_tokens": 16,
            "gen_ai.usage.output_tokens": usage["completion_tokens"],
        }.items():
            assert attributes[name] == value, name
        assert span.status.status_code is StatusCode.UNSET
        histograms = traced.histograms()
        assert histograms["gen_ai.server.request.duration"].count == 1
        assert histograms["gen_ai.server.time_to_first_token"].count == 1
        assert histograms["gen_ai.server.time_per_output_token"].count == 1

    async def test_a_span_ends_with_its_stream_also_when_the_reader_leaves(
        self, start_replica: StartReplica, traced: Traced
    ) -> None:
        replica = await start_replica(telemetry=traced.telemetry)
        replica.say("abcdefghij" * 5, delay_s=0.01)
        task = asyncio.create_task(replica.complete(stream=True))
        await eventually(lambda: replica.engine.num_open > 0)
        await asyncio.sleep(0.15)
        assert traced.exporter.get_finished_spans() == ()
        task.cancel()
        span = await traced.span()
        attributes = dict(span.attributes or {})
        assert attributes["gen_ai.response.finish_reasons"] == ("abort",)
        assert (
            attributes["gen_ai.usage.output_tokens"]
            == (await replica.usages())[0]["usage"]["completion_tokens"]
        )
        assert span.end_time is not None
        assert span.start_time is not None
        assert span.end_time - span.start_time > 0.1e9

    async def test_a_failure_has_its_error_type(self, start_replica: StartReplica, traced: Traced) -> None:
        replica = await start_replica(telemetry=traced.telemetry)
        replica.say("abcdefghij", delay_s=0.02)
        running = asyncio.create_task(replica.complete(stream=True))
        await eventually(lambda: replica.engine.num_open > 0)
        await asyncio.sleep(0.05)
        replica.engine.die()
        await running
        span = await traced.span()
        assert dict(span.attributes or {})["error.type"] == "engine_died"
        assert span.status.status_code is StatusCode.ERROR
        duration = traced.histograms()["gen_ai.server.request.duration"]
        assert duration.attributes["error.type"] == "engine_died"

    async def test_a_refusal_has_its_error_type(self, start_replica: StartReplica, traced: Traced) -> None:
        replica = await start_replica(telemetry=traced.telemetry)
        await replica.complete(max_tokens=10_000)
        span = await traced.span()
        assert dict(span.attributes or {})["error.type"] == "context_length_exceeded"

    async def test_nothing_that_was_said_is_traced(self, start_replica: StartReplica, traced: Traced) -> None:
        replica = await start_replica(telemetry=traced.telemetry)
        replica.say(SECRET)
        await replica.complete(messages=[{"role": "user", "content": SECRET}], stop=[SECRET + "x"])
        assert SECRET not in (await traced.span()).to_json()

    def test_without_an_endpoint_nothing_is_built(self, config: BackendConfig) -> None:
        assert isinstance(build_telemetry(config), NoTelemetry)


class TestLogs:
    async def test_one_line_a_request_with_counts_and_without_words(
        self, replica: Replica, caplog: pytest.LogCaptureFixture
    ) -> None:
        caplog.set_level(logging.DEBUG)
        replica.say(SECRET)
        await replica.complete(
            messages=[{"role": "user", "content": SECRET}],
            request_id="r1",
            account_id="a" * 32,
            stop=[SECRET + "x"],
            stream=True,
        )
        await replica.complete(messages=[{"role": "user", "content": {SECRET: 1}}], request_id="r2")
        formatter = JsonLogFormatter("replica-0")
        lines = [formatter.format(record) for record in caplog.records]
        assert not any(SECRET in line for line in lines)
        entries = [json.loads(line) for line in lines if '"message":"request"' in line]
        assert [(e["request_id"], e.get("error")) for e in entries] == [("r1", None), ("r2", "invalid_value")]
        assert entries[0]["account"] == "a" * 32
        assert entries[0]["replica"] == "replica-0"
        assert entries[0]["finish_reason"] == "stop"
        assert entries[0]["completion_tokens"] == len(replica.engine.scripts[0].token_ids)
        assert entries[0]["duration_ms"] >= entries[0]["ttft_ms"] > 0
        assert "completion_tokens" not in entries[1]

    def test_an_exception_is_part_of_its_line(self) -> None:
        try:
            raise ValueError("broken")
        except ValueError as error:
            record = logging.LogRecord(
                "n", logging.ERROR, "f", 1, "it failed", (), (type(error), error, None)
            )
        entry = json.loads(JsonLogFormatter("r").format(record))
        assert entry["level"] == "error"
        assert "ValueError: broken" in entry["exception"]
