"""What the tiers below a KV cache did, for Prometheus; tokens under vLLM's names for caches elsewhere."""

from __future__ import annotations

from collections.abc import Iterator

from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric

from backend.engine.messages import TierStats


def tier_metrics(model: str, stats: TierStats) -> Iterator[Metric]:
    """The figures of one replica, labelled with the model that it serves."""
    counters = (
        ("vllm:external_prefix_cache_queries", "Prompt tokens looked up in the cache tiers", stats.queries),
        ("vllm:external_prefix_cache_hits", "Prompt tokens loaded from the cache tiers", stats.hits),
        ("embergate_kv_tier_demoted_blocks", "Evicted blocks taken in", stats.num_demoted),
        ("embergate_kv_tier_refused_loads", "Loads dearer than computing", stats.num_refused),
        ("embergate_kv_tier_given_up_loads", "Loads too late or wrong", stats.num_ended_early),
        ("embergate_kv_tier_corrupt_blocks", "Blocks of the disk that failed their check", stats.num_corrupt),
        ("embergate_kv_tier_disk_failures", "Reads and writes the disk refused", stats.num_disk_failures),
        ("embergate_kv_tier_dropped_blocks", "Blocks not written: queue or disk full", stats.num_dropped),
    )
    gauges = (
        ("embergate_kv_tier_host_bytes", "Blocks in the host's memory", stats.num_host_bytes),
        ("embergate_kv_tier_disk_bytes", "Blocks on the disk", stats.num_disk_bytes),
        ("embergate_kv_tier_disk_writable", "1 while the disk takes blocks", int(stats.is_disk_writable)),
    )
    for name, text, value in counters:
        counter = CounterMetricFamily(name, text, labels=["model_name"])
        counter.add_metric([model], value)
        yield counter
    for name, text, value in gauges:
        gauge = GaugeMetricFamily(name, text, labels=["model_name"])
        gauge.add_metric([model], value)
        yield gauge
