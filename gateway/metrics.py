"""Prometheus metrics of the edge, under the names that operators of gateways have dashboards for.

``smg_*`` is what routers call requests and workers, ``litellm_*`` what gateways call tokens and spend; what
nobody else has is ``embergate_*``. Labels are bounded: accounts beyond ``max_account_labels`` count as
``other``, and models are those of the catalog. Children are looked up once per label set, so that a request
costs a few additions.
"""

from __future__ import annotations

from collections.abc import Callable

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, generate_latest

from billing.rates import Charge
from billing.usage import UsageRecord
from gateway.replicas import Replica, ReplicaTable

_LATENCY_BUCKETS_S = (0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 20.0, 40.0, 80.0, 160.0, 320.0)
_COMMIT_BUCKETS_S = (0.0001, 0.00025, 0.0005, 0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.5, 1.0, 5.0)
_NANOS = 1_000_000_000
_MICROS = 1_000_000


class _AccountModelCounters:
    """The counters of one (account, model)."""

    __slots__ = ("cached", "completion", "prompt", "spend")

    def __init__(self, metrics: GatewayMetrics, account: str, model: str) -> None:
        self.prompt = metrics.prompt_tokens.labels(account, model)
        self.cached = metrics.cached_tokens.labels(account, model)
        self.completion = metrics.completion_tokens.labels(account, model)
        self.spend = metrics.spend.labels(account, model)


class GatewayMetrics:
    """All metrics in a registry of their own."""

    def __init__(self, max_account_labels: int) -> None:
        registry = self.registry = CollectorRegistry()
        self._max_account_labels = max_account_labels
        self._accounts: set[str] = set()
        self._tokens: dict[tuple[str, str], _AccountModelCounters] = {}
        self._requests: dict[tuple[str, str, int], Counter] = {}
        account_model = ("account", "model")
        self.requests = Counter(
            "smg_http_requests", "Requests answered.", ("surface", "model", "status"), registry=registry
        )
        self.in_flight = Gauge("litellm_in_flight_requests", "Requests in flight.", registry=registry)
        self.rate_limited = Counter(
            "smg_http_rate_limit", "Requests refused with 429.", ("reason",), registry=registry
        )
        self.ttft = Histogram(
            "smg_router_ttft_seconds",
            "Time to the first chunk or, without streaming, to the answer.",
            ("model",),
            buckets=_LATENCY_BUCKETS_S,
            registry=registry,
        )
        self.latency = Histogram(
            "litellm_request_total_latency_metric",
            "Seconds from admission to the durable record.",
            ("model",),
            buckets=_LATENCY_BUCKETS_S,
            registry=registry,
        )
        self.retries = Counter(
            "smg_worker_retries", "Attempts on a further replica.", ("model",), registry=registry
        )
        self.selections = Counter(
            "smg_worker_selection", "Requests answered by each replica.", ("worker",), registry=registry
        )
        self.prompt_tokens = Counter(
            "litellm_input_tokens_metric",
            "Prompt tokens, cached ones included.",
            account_model,
            registry=registry,
        )
        self.cached_tokens = Counter(
            "litellm_input_cached_tokens_metric", "Cached prompt tokens.", account_model, registry=registry
        )
        self.completion_tokens = Counter(
            "litellm_output_tokens_metric", "Completion tokens.", account_model, registry=registry
        )
        self.spend = Counter(
            "litellm_spend_metric",
            "Charged, in the currency of the rate cards.",
            account_model,
            registry=registry,
        )
        self.records = Counter(
            "embergate_usage_records", "Durable usage records.", ("status", "estimated"), registry=registry
        )
        self.predicted = Counter(
            "embergate_predicted_cached_tokens",
            "Cached prompt tokens expected from the previous turn on the same replica.",
            ("model",),
            registry=registry,
        )
        self.mispredicted = Counter(
            "embergate_cache_mispredictions",
            "Requests with fewer cached prompt tokens than expected.",
            ("model",),
            registry=registry,
        )
        self.commit_seconds = Histogram(
            "embergate_metering_commit_seconds",
            "Seconds that one group of usage records took to become durable.",
            buckets=_COMMIT_BUCKETS_S,
            registry=registry,
        )
        self.commit_size = Counter(
            "embergate_metering_committed_records", "Usage records made durable.", registry=registry
        )

    def watch(
        self, table: ReplicaTable, num_pending: Callable[[], int], num_unposted: Callable[[], int]
    ) -> None:
        """Export state that others keep, read when it is asked for."""
        health = Gauge(
            "smg_worker_health", "1 when the replica is ready.", ("worker",), registry=self.registry
        )
        active = Gauge(
            "smg_worker_requests_active", "Requests in flight.", ("worker",), registry=self.registry
        )
        for replica in table.replicas:
            health.labels(replica.id).set_function(_is_ready(replica))
            active.labels(replica.id).set_function(_num_in_flight(replica))
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
        key = (surface, model, status)
        child = self._requests.get(key)
        if child is None:
            child = self._requests[key] = self.requests.labels(surface, model, str(status))
        child.inc()

    def count_record(self, record: UsageRecord, charge: Charge, predicted_cached_tokens: int) -> None:
        """One usage record was made."""
        model = record.model
        counters = self._counters_of(record.account_id, model)
        counters.prompt.inc(record.prompt_tokens)
        counters.cached.inc(record.cached_prompt_tokens)
        counters.completion.inc(record.completion_tokens)
        counters.spend.inc(charge.amount_nanos / _NANOS)
        self.records.labels(record.status, "true" if record.is_estimated else "false").inc()
        self.selections.labels(record.replica_id).inc()
        self.latency.labels(model).observe((record.finished_at_us - record.started_at_us) / _MICROS)
        if record.ttft_us:
            self.ttft.labels(model).observe(record.ttft_us / _MICROS)
        if record.num_attempts > 1:
            self.retries.labels(model).inc(record.num_attempts - 1)
        if predicted_cached_tokens:
            self.predicted.labels(model).inc(predicted_cached_tokens)
            if record.cached_prompt_tokens < predicted_cached_tokens // 2:
                self.mispredicted.labels(model).inc()

    def observe_commit(self, num_records: int, seconds: float) -> None:
        """A group of records became durable."""
        self.commit_seconds.observe(seconds)
        self.commit_size.inc(num_records)

    def export(self) -> bytes:
        """The exposition format."""
        return generate_latest(self.registry)

    def _counters_of(self, account_id: str, model: str) -> _AccountModelCounters:
        key = (account_id, model)
        counters = self._tokens.get(key)
        if counters is None:
            if account_id not in self._accounts and len(self._accounts) >= self._max_account_labels:
                key = ("other", model)
                counters = self._tokens.get(key)
                if counters is not None:
                    return counters
            else:
                self._accounts.add(account_id)
            counters = self._tokens[key] = _AccountModelCounters(self, *key)
        return counters


def _is_ready(replica: Replica) -> Callable[[], float]:
    return lambda: float(replica.health == "ready")


def _num_in_flight(replica: Replica) -> Callable[[], float]:
    return lambda: float(replica.num_in_flight)
