"""Puts the queue together for one gateway; called by :mod:`gateway.app`, which has the parts."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Mapping, Sequence

from billing.accounts import Principal
from billing.rates import RateBook
from billing.store import Store
from gateway.auth import Authenticator
from gateway.batches.archive import BatchArchive
from gateway.batches.closing import BatchCloser
from gateway.batches.config import BatchesConfig
from gateway.batches.files import FileStore
from gateway.batches.forms import ItemForm
from gateway.batches.headroom import Headroom
from gateway.batches.jobs import NATIVE_ENDPOINT
from gateway.batches.lanes import Lanes
from gateway.batches.metrics import BatchMetrics
from gateway.batches.native import NativeBatches
from gateway.batches.openai import OpenAIBatches
from gateway.batches.queue import BatchQueue
from gateway.batches.runner import ItemPipeline, ItemRunner
from gateway.batches.selection import Selector
from gateway.batches.worker import BatchWorker
from gateway.call import SurfaceForm
from gateway.catalog import Catalog
from gateway.client import ReplicaClient
from gateway.handlers.batches import BatchRoutes
from gateway.handlers.files import FileRoutes
from gateway.handlers.native_batches import BatchCalls
from gateway.replicas import Replica, ReplicaTable
from gateway.routing import Ranking
from gateway.telemetry import Telemetry


class BatchAssembly:
    """The queue of one gateway.

    Attributes:
        worker: runs items; to be started and stopped.
        calls: answers submissions and polls among native requests.
        routes: files and batches of the OpenAI surface.
    """

    def __init__(
        self,
        config: BatchesConfig,
        owner: str,
        *,
        store: Store,
        rate_book: RateBook,
        catalog: Catalog,
        authenticator: Authenticator,
        admit: Callable[[Principal, str], None],
        pipeline: ItemPipeline,
        surfaces: Mapping[str, SurfaceForm],
        table: ReplicaTable,
        ranking: Ranking[Replica],
        client: ReplicaClient,
        replica_headers: Sequence[tuple[str, str]],
        telemetry: Telemetry,
    ) -> None:
        """``surfaces`` read the bodies of items, by endpoint; the one of ``/ai/run`` is the native one."""
        clock = asyncio.get_running_loop().time
        queue = BatchQueue(store, rate_book, config)
        archive = BatchArchive(store)
        closer = BatchCloser(store, config)
        files = FileStore(store, archive, config)
        metrics = BatchMetrics(store)
        telemetry.metrics.registry.register(metrics)
        forms = {endpoint: ItemForm(surface) for endpoint, surface in surfaces.items()}
        self.worker = BatchWorker(
            owner,
            queue,
            closer,
            Selector(queue, Lanes(ranking), table, catalog),
            Headroom(table, client, replica_headers, config, clock),
            ItemRunner(pipeline, forms, telemetry, config, clock),
            table,
            metrics,
            config,
        )
        wake = self.worker.wake
        native = NativeBatches(queue, archive, catalog, config, admit, wake)
        openai = OpenAIBatches(queue, archive, files, config, forms.keys() - {NATIVE_ENDPOINT})
        self.calls = BatchCalls(native, authenticator)
        self.routes = (
            FileRoutes(authenticator, files, config),
            BatchRoutes(authenticator, openai, archive, closer, admit, wake),
        )
