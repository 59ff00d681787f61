"""Prometheus metrics of the queue. Gauges describe the whole store, counters this gateway's part in it."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Sequence

from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.registry import Collector
from sqlalchemy import exists, func, select

from billing.batch_schema import batch_items, batches
from billing.store import Store
from gateway.batches.jobs import OPEN_STATES, OPEN_STATUSES, Ending
from gateway.batches.queue import now_us

_MICROS = 1_000_000
_BATCH, _ITEM = batches.c, batch_items.c


class BatchMetrics(Collector):
    """What the worker counts, and what it sees when it looks, which a thread does."""

    def __init__(self, store: Store, clock: Callable[[], int] = now_us) -> None:
        """``clock`` returns UTC microseconds."""
        self._store = store
        self._clock = clock
        self._num_ended: Counter[str] = Counter()
        self._num_items: dict[str, int] = dict.fromkeys(OPEN_STATES, 0)
        self._num_batches: dict[str, int] = dict.fromkeys(OPEN_STATUSES, 0)
        self._oldest_us: int | None = None
        self.num_preempted = 0
        self.num_lost = 0
        self.num_reclaimed = 0

    def count_ended(self, endings: Sequence[Ending], num_lost: int) -> None:
        """Endings were saved, of which ``num_lost`` came too late."""
        for ending in endings:
            self._num_ended["succeeded" if ending.is_success else "failed"] += 1
        self.num_lost += num_lost

    def look(self) -> None:
        """Read the gauges from the store. Blocking; raises StoreError."""
        is_open = _BATCH.status.in_(OPEN_STATUSES)
        by_status = select(_BATCH.status, func.count()).where(is_open).group_by(_BATCH.status)
        by_state = select(_ITEM.state, func.count()).where(_ITEM.state.in_(OPEN_STATES)).group_by(_ITEM.state)
        waits = exists().where(_ITEM.batch_id == _BATCH.id, _ITEM.state == "queued")
        with self._store.reading() as connection:
            statuses = {row[0]: row[1] for row in connection.execute(by_status)}
            states = {row[0]: row[1] for row in connection.execute(by_state)}
            self._oldest_us = connection.scalar(select(func.min(_BATCH.created_at_us)).where(is_open, waits))
        self._num_batches = dict.fromkeys(OPEN_STATUSES, 0) | statuses
        self._num_items = dict.fromkeys(OPEN_STATES, 0) | states

    def collect(self) -> Iterable[Metric]:
        """What was counted and seen, as Prometheus sees it."""
        yield _gauge("embergate_batches", "Batches that have not ended.", "status", self._num_batches)
        yield _gauge("embergate_batch_items", "Items that have not ended.", "state", self._num_items)
        oldest_us = self._oldest_us
        age_s = 0.0 if oldest_us is None else max(self._clock() - oldest_us, 0) / _MICROS
        yield GaugeMetricFamily(
            "embergate_batch_oldest_queued_seconds", "Age of the oldest item that waits to be run.", age_s
        )
        ended = CounterMetricFamily("embergate_batch_items_ended", "Items ended here.", labels=("outcome",))
        for outcome, count in self._num_ended.items():
            ended.add_metric([outcome], count)
        yield ended
        for name, text, count in (
            (
                "embergate_batch_items_preempted",
                "Items that made room for live requests.",
                self.num_preempted,
            ),
            ("embergate_batch_leases_lost", "Items whose end came after another took them.", self.num_lost),
            ("embergate_batch_leases_reclaimed", "Leases taken back after they ran out.", self.num_reclaimed),
        ):
            yield CounterMetricFamily(name, text, count)


def _gauge(name: str, text: str, label: str, values: dict[str, int]) -> Metric:
    family = GaugeMetricFamily(name, text, labels=(label,))
    for value, count in values.items():
        family.add_metric([value], count)
    return family
