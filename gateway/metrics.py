"""Prometheus metrics of the edge, under the names that operators of gateways have dashboards for.

``smg_*`` is what routers call requests and workers, ``litellm_*`` what gateways call tokens and spend; what
nobody else has is ``embergate_*``. Labels are bounded: accounts beyond ``max_account_labels`` count as
``other``, and models are those of the catalog.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Sequence

from prometheus_client import CollectorRegistry, Gauge, generate_latest
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, HistogramMetricFamily, Metric
from prometheus_client.registry import Collector

from billing.rates import Charge
from billing.usage import UsageRecord
from gateway.replicas import ReplicaTable
from gateway.tallies import LightHistogram, RecordKey, RecordTallies, RecordTally

_LATENCY_BUCKETS_S = (0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 20.0, 40.0, 80.0, 160.0, 320.0)
_COMMIT_BUCKETS_S = (0.0001, 0.00025, 0.0005, 0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.5, 1.0, 5.0)
_NANOS = 1_000_000_000
_MICROS = 1_000_000

_Value = Callable[[RecordTally], float]
_BY_ACCOUNT: tuple[tuple[str, str, _Value], ...] = (
    (
        "litellm_input_tokens_metric",
        "Prompt tokens, cached ones included.",
        lambda tally: tally.prompt_tokens,
    ),
    (
        "litellm_input_cached_tokens_metric",
        "Cached prompt tokens.",
        lambda tally: tally.cached_prompt_tokens,
    ),
    ("litellm_output_tokens_metric", "Completion tokens.", lambda tally: tally.completion_tokens),
    (
        "litellm_spend_metric",
        "Charged, in the currency of the rate cards.",
        lambda tally: tally.amount_nanos / _NANOS,
    ),
)
_BY_MODEL: tuple[tuple[str, str, _Value], ...] = (
    ("smg_worker_retries", "Attempts on a further replica.", lambda tally: tally.num_retries),
    (
        "embergate_predicted_cached_tokens",
        "Cached prompt tokens expected from the previous turn on the same replica.",
        lambda tally: tally.predicted_cached_tokens,
    ),
    (
        "embergate_cache_mispredictions",
        "Requests with fewer cached prompt tokens than expected.",
        lambda tally: tally.num_mispredicted,
    ),
)


class GatewayMetrics(Collector):
    """All metrics in a registry of their own; belongs to one event loop."""

    def __init__(self, max_account_labels: int) -> None:
        self.num_in_flight = 0
        self._requests: Counter[tuple[str, str, int]] = Counter()
        self._rate_limited: Counter[str] = Counter()
        self._records = RecordTallies(max_account_labels)
        self._latency: dict[str, LightHistogram] = {}
        self._ttft: dict[str, LightHistogram] = {}
        self._commit_seconds = LightHistogram(_COMMIT_BUCKETS_S)
        self._num_committed = 0
        self.registry = CollectorRegistry(auto_describe=False)
        self.registry.register(self)

    def watch(
        self, table: ReplicaTable, num_pending: Callable[[], int], num_unposted: Callable[[], int]
    ) -> None:
        """Export state that others keep, read when it is asked for."""
        self.registry.register(_WorkerCollector(table))
        for name, text, read in (
            (
                "smg_scheduler_queue_depth",
                "Requests that wait for a replica with room.",
                lambda: table.num_waiting,
            ),
            ("embergate_metering_pending_records", "Usage records on their way to the disk.", num_pending),
            ("embergate_metering_unposted_records", "Durable records not yet in the ledger.", num_unposted),
        ):
            Gauge(name, text, registry=self.registry).set_function(read)

    def count_request(self, surface: str, model: str, status: int) -> None:
        """One request was answered with this HTTP status; ``model`` is "" when none was found."""
        self._requests[surface, model, status] += 1

    def count_rate_limited(self, reason: str) -> None:
        """One request was refused with 429."""
        self._rate_limited[reason] += 1

    def count_record(self, record: UsageRecord, charge: Charge, predicted_cached_tokens: int) -> None:
        """One usage record was made."""
        self._records.add(record, charge, predicted_cached_tokens)
        _observe(self._latency, record.model, (record.finished_at_us - record.started_at_us) / _MICROS)
        if record.ttft_us:
            _observe(self._ttft, record.model, record.ttft_us / _MICROS)

    def observe_commit(self, num_records: int, seconds: float) -> None:
        """A group of records became durable."""
        self._commit_seconds.observe(seconds)
        self._num_committed += num_records

    def export(self) -> bytes:
        """The exposition format."""
        return generate_latest(self.registry)

    def collect(self) -> Iterable[Metric]:
        """What was counted, as Prometheus sees it."""
        requests = ("surface", "model", "status")
        counts = [
            ((surface, model, str(status)), n) for (surface, model, status), n in self._requests.items()
        ]
        yield _counter("smg_http_requests", "Requests answered.", requests, counts)
        limited = [((reason,), count) for reason, count in self._rate_limited.items()]
        yield _counter("smg_http_rate_limit", "Requests refused with 429.", ("reason",), limited)
        yield GaugeMetricFamily("litellm_in_flight_requests", "Requests in flight.", self.num_in_flight)
        yield from self._record_families()
        yield _histogram(
            "smg_router_ttft_seconds",
            "Time to the first chunk or, without streaming, to the answer.",
            self._ttft,
        )
        yield _histogram(
            "litellm_request_total_latency_metric",
            "Seconds from admission to the durable record.",
            self._latency,
        )
        commit = HistogramMetricFamily(
            "embergate_metering_commit_seconds",
            "Seconds that one group of usage records took to become durable.",
        )
        self._commit_seconds.add_to(commit, [])
        yield commit
        yield CounterMetricFamily(
            "embergate_metering_committed_records", "Usage records made durable.", self._num_committed
        )

    def _record_families(self) -> Iterable[Metric]:
        for name, text, value in _BY_ACCOUNT:
            yield _counter(name, text, ("account", "model"), self._sum(value, lambda key: key[:2]))
        for name, text, value in _BY_MODEL:
            yield _counter(name, text, ("model",), self._sum(value, lambda key: key[1:2]))
        by_replica = self._sum(lambda tally: tally.num_records, lambda key: key[2:3])
        yield _counter("smg_worker_selection", "Requests answered by each replica.", ("worker",), by_replica)
        by_status = self._sum(
            lambda tally: tally.num_records, lambda key: (key[3], "true" if key[4] else "false")
        )
        yield _counter(
            "embergate_usage_records", "Durable usage records.", ("status", "estimated"), by_status
        )

    def _sum(
        self, value: _Value, group: Callable[[RecordKey], tuple[str, ...]]
    ) -> Iterable[tuple[Sequence[str], float]]:
        sums: dict[tuple[str, ...], float] = {}
        for key, tally in self._records.items():
            labels = group(key)
            sums[labels] = sums.get(labels, 0) + value(tally)
        return sums.items()


def _observe(histograms: dict[str, LightHistogram], model: str, seconds: float) -> None:
    histogram = histograms.get(model)
    if histogram is None:
        histogram = histograms[model] = LightHistogram(_LATENCY_BUCKETS_S)
    histogram.observe(seconds)


def _counter(
    name: str, text: str, labels: tuple[str, ...], values: Iterable[tuple[Sequence[str], float]]
) -> Metric:
    family = CounterMetricFamily(name, text, labels=labels)
    for key, value in values:
        family.add_metric(key, value)
    return family


def _histogram(name: str, text: str, histograms: dict[str, LightHistogram]) -> Metric:
    family = HistogramMetricFamily(name, text, labels=("model",))
    for model, histogram in histograms.items():
        histogram.add_to(family, [model])
    return family


class _WorkerCollector(Collector):
    """Health and load of the replicas that are there at the moment of the scrape."""

    def __init__(self, table: ReplicaTable) -> None:
        self._table = table

    def collect(self) -> Iterable[Metric]:
        health = GaugeMetricFamily("smg_worker_health", "1 when the replica is ready.", labels=("worker",))
        active = GaugeMetricFamily("smg_worker_requests_active", "Requests in flight.", labels=("worker",))
        for replica in self._table.replicas:
            health.add_metric((replica.id,), float(replica.health == "ready"))
            active.add_metric((replica.id,), float(replica.num_in_flight))
        return (health, active)
