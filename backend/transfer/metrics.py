"""What Prometheus is told of blocks on their way between replicas."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import get_args

from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.registry import Collector

from backend.engine.messages import EngineStats
from backend.transfer.counters import Failure, TransferCounters


class TransferCollector(Collector):
    """Reads the counters of one replica at the moment of the scrape."""

    def __init__(
        self, model: str, counters: TransferCounters, read_stats: Callable[[], EngineStats | None]
    ) -> None:
        self._model = model
        self._counters = counters
        self._read_stats = read_stats

    def collect(self) -> Iterable[Metric]:
        """The families, each with its few and fixed labels."""
        own = self._counters
        yield self._directions("transfers_started", "Prompts", own.num_started_in, own.num_started_out)
        yield self._directions(
            "transfers_completed", "Prompts, all blocks", own.num_completed_in, own.num_completed_out
        )
        yield self._directions("transfer_blocks", "KV blocks", own.num_blocks_in, own.num_blocks_out)
        yield self._directions("transfer_bytes", "Bytes of records", own.num_bytes_in, own.num_bytes_out)
        failures = CounterMetricFamily(
            "embergate_transfer_failures",
            "Transfers that ended early; the rest of the prompt was computed where its answer is",
            labels=["model_name", "reason"],
        )
        for reason in get_args(Failure):
            failures.add_metric([self._model, reason], own.failures[reason])
        yield failures
        stats = self._read_stats()
        held = GaugeMetricFamily(
            "embergate_kv_held_blocks",
            "KV blocks kept for other replicas and tiers, each for a bounded time",
            labels=["model_name"],
        )
        held.add_metric([self._model], 0 if stats is None else stats.num_held_blocks)
        yield held

    def _directions(self, name: str, what: str, num_in: int, num_out: int) -> Metric:
        family = CounterMetricFamily(
            f"embergate_{name}", f"{what} that came from and went to other replicas",
            labels=["model_name", "direction"],
        )  # fmt: skip
        family.add_metric([self._model, "in"], num_in)
        family.add_metric([self._model, "out"], num_out)
        return family
