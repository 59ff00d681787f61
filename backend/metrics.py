"""What a replica counts for Prometheus, under the names that operators' dashboards know from vLLM.

Owner of state: one replica's registry. Label sets are bounded: the model that is served, finish reasons,
refusal codes. Gauges and the engine's own counters are read when somebody asks; the rest is observed as
requests go.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Callable, Iterable
from itertools import accumulate
from typing import Final, Literal

from prometheus_client import CollectorRegistry, Counter, Histogram
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, HistogramMetricFamily, Metric
from prometheus_client.exposition import CONTENT_TYPE_LATEST, generate_latest
from prometheus_client.registry import Collector
from prometheus_client.utils import floatToGoString

from backend.engine.messages import EngineStats
from backend.tier_metrics import tier_metrics
from backend.wire import FinishReason, TokenUsage

CONTENT_TYPE: Final = CONTENT_TYPE_LATEST

_FIRST_TOKEN_BUCKETS: Final = (
    0.001, 0.005, 0.01, 0.02, 0.04, 0.06, 0.08, 0.1, 0.25, 0.5, 0.75, 1, 2.5, 5, 7.5, 10, 20, 40, 80, 160,
)  # fmt: skip
_INTER_TOKEN_BUCKETS: Final = (
    0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.075, 0.1, 0.15, 0.2, 0.3, 0.4, 0.5, 0.75, 1, 2.5, 5, 10,
)  # fmt: skip
_REQUEST_BUCKETS: Final = (
    0.1, 0.3, 0.5, 0.8, 1, 1.5, 2, 2.5, 5, 10, 15, 20, 30, 40, 50, 60, 120, 240, 480, 960,
)  # fmt: skip
_TOKEN_BUCKETS: Final = tuple(2.0**power for power in range(21))


class ReplicaMetrics:
    """Metrics of one replica.

    Args:
        model: the catalog id that is served; the only model label.
        read_stats: the engine's figures, or None while there is no engine.
    """

    def __init__(self, model: str, read_stats: Callable[[], EngineStats | None]) -> None:
        self._registry = CollectorRegistry(auto_describe=False)
        self._registry.register(_EngineCollector(model, read_stats))
        self._prompt = self._counter("prompt_tokens", "Prompt tokens of finished requests", model)
        self._cached = self._counter(
            "prompt_tokens_cached", "Prompt tokens of finished requests that the prefix cache served", model
        )
        self._generated = self._counter("generation_tokens", "Completion tokens of finished requests", model)
        self._endings = Counter(
            "vllm:request_success", "Finished requests", ["model_name", "finished_reason"],
            registry=self._registry,
        )  # fmt: skip
        self._refusals = Counter(
            "vllm:admission_rejections", "Requests that were refused", ["model_name", "reason"],
            registry=self._registry,
        )  # fmt: skip
        self._checks = Counter(
            "embergate_answers_checked", "Answers that had to meet a schema, looked at once more",
            ["model_name", "verdict"], registry=self._registry,
        )  # fmt: skip
        self._model = model
        histogram = self._histogram
        seconds = "_seconds"
        self.first_token = histogram("time_to_first_token" + seconds, _FIRST_TOKEN_BUCKETS, model)
        self.inter_token = LatencyHistogram("inter_token_latency" + seconds, _INTER_TOKEN_BUCKETS, model)
        self._registry.register(self.inter_token)
        self.per_output_token = histogram(
            "request_time_per_output_token" + seconds, _INTER_TOKEN_BUCKETS, model
        )
        self.end_to_end = histogram("e2e_request_latency" + seconds, _REQUEST_BUCKETS, model)
        self.queue = histogram("request_queue_time" + seconds, _REQUEST_BUCKETS, model)
        self.request_prompt = histogram("request_prompt_tokens", _TOKEN_BUCKETS, model)
        self.request_generation = histogram("request_generation_tokens", _TOKEN_BUCKETS, model)

    def count_end(self, usage: TokenUsage, reason: FinishReason) -> None:
        """Count the end of an admitted request with the counts that it is billed by."""
        self._prompt.inc(usage.prompt_tokens)
        self._cached.inc(usage.cached_prompt_tokens)
        self._generated.inc(usage.completion_tokens)
        self._endings.labels(self._model, reason).inc()
        self.request_prompt.observe(usage.prompt_tokens)
        self.request_generation.observe(usage.completion_tokens)

    def count_refusal(self, code: str) -> None:
        """``code`` is one of this replica's own error codes, never text of a client."""
        self._refusals.labels(self._model, code).inc()

    def count_check(self, verdict: Literal["met", "broken", "unjudged"]) -> None:
        """Count a look at an answer that had to meet a schema."""
        self._checks.labels(self._model, verdict).inc()

    def register(self, collector: Collector) -> None:
        """Expose what another part of the replica counts."""
        self._registry.register(collector)

    def expose(self) -> bytes:
        """The Prometheus text format."""
        return generate_latest(self._registry)

    def _counter(self, name: str, text: str, model: str) -> Counter:
        return Counter(f"vllm:{name}", text, ["model_name"], registry=self._registry).labels(model)

    def _histogram(self, name: str, buckets: tuple[float, ...], model: str) -> Histogram:
        text = name.replace("_", " ").capitalize()
        family = Histogram(f"vllm:{name}", text, ["model_name"], registry=self._registry, buckets=buckets)
        return family.labels(model)


class LatencyHistogram(Collector):
    """A histogram for what happens once a token.

    The library's own takes a lock per bucket and per sum. This one belongs to the event loop's thread and
    costs a bisection and two additions.
    """

    def __init__(self, name: str, buckets: tuple[float, ...], model: str) -> None:
        self._name = name
        self._model = model
        self._bounds = buckets
        self._counts = [0] * (len(buckets) + 1)
        self._sum = 0.0

    def observe(self, seconds: float) -> None:
        self._counts[bisect_left(self._bounds, seconds)] += 1
        self._sum += seconds

    def collect(self) -> Iterable[Metric]:
        bounds = [*map(floatToGoString, self._bounds), "+Inf"]
        cumulative = list(zip(bounds, accumulate(map(float, self._counts)), strict=True))
        family = HistogramMetricFamily(f"vllm:{self._name}", "Inter token latency", labels=["model_name"])
        family.add_metric([self._model], cumulative, self._sum)
        yield family


class _EngineCollector(Collector):
    """The engine's gauges and counters, read at the moment of the scrape."""

    def __init__(self, model: str, read_stats: Callable[[], EngineStats | None]) -> None:
        self._model = model
        self._read_stats = read_stats

    def collect(self) -> Iterable[Metric]:
        stats = self._read_stats()
        if stats is None:
            return
        num_used = stats.num_blocks - stats.num_free_blocks - stats.num_cached_blocks
        gauges = (
            ("num_requests_running", "Sequences in the batch", stats.num_running),
            ("num_requests_waiting", "Sequences that wait for a place", stats.num_waiting),
            ("kv_cache_usage_perc", "Share of KV blocks in use, 0 to 1", num_used / max(1, stats.num_blocks)),
        )
        counters = (
            ("prefix_cache_queries", "Prompt tokens looked up in the prefix cache", stats.prompt_tokens),
            ("prefix_cache_hits", "Prompt tokens found in the prefix cache", stats.cached_prompt_tokens),
            ("num_preemptions", "Sequences that lost their blocks to others", stats.num_preemptions),
            ("spec_decode_num_draft_tokens", "Tokens guessed", stats.num_draft_tokens),
            (
                "spec_decode_num_accepted_tokens",
                "Guessed tokens that the model confirmed",
                stats.num_right_draft_tokens,
            ),
        )
        mismatches = CounterMetricFamily(
            "embergate_kv_mismatches",
            "Sequences ended because a KV block did not hold what they had put there",
            labels=["model_name"],
        )
        mismatches.add_metric([self._model], stats.num_kv_mismatches)
        yield mismatches
        if stats.tiers is not None:
            yield from tier_metrics(self._model, stats.tiers)
        for name, text, value in gauges:
            gauge = GaugeMetricFamily(f"vllm:{name}", text, labels=["model_name"])
            gauge.add_metric([self._model], value)
            yield gauge
        for name, text, value in counters:
            counter = CounterMetricFamily(f"vllm:{name}", text, labels=["model_name"])
            counter.add_metric([self._model], value)
            yield counter
