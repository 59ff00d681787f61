"""Composition root of the edge: builds every object once, wires the routes, starts and stops."""

from __future__ import annotations

import asyncio
import gc
import logging
import signal
import time
from collections.abc import Sequence
from pathlib import Path

import uvloop
from aiohttp import web

from billing.accounts import AccountDirectory
from billing.config import BillingConfig
from billing.posting import Poster
from billing.rates import RateBook
from billing.spool import Spool
from billing.store import Store
from gateway.auth import Authenticator, SaltMaker
from gateway.catalog import Catalog
from gateway.client import ReplicaClient
from gateway.config import GatewayConfig, ReplicaAddress, ServedModel
from gateway.dispatch import Dispatcher
from gateway.edge.aiohttp_exchange import serve_exchange
from gateway.edge.server import EdgeServer
from gateway.handlers.inference import InferenceRoutes
from gateway.handlers.native import NativeForm
from gateway.handlers.openai import OpenAIForm
from gateway.handlers.ops import OpsRoutes, edge_refusal, envelop_errors
from gateway.limits import AccountLimits
from gateway.logs import AccessLog, configure_logging, stderr_writer
from gateway.metering import UsageJournal
from gateway.metrics import GatewayMetrics
from gateway.pipeline import Pipeline
from gateway.predictions import CachePredictions
from gateway.probes import HealthProber
from gateway.reconciliation import KnownRequests, Reconciler
from gateway.replicas import Replica, ReplicaTable
from gateway.routing import Ranking, RingRanking, rank_by_rendezvous
from gateway.secret_files import CACHE_SALT_SECRET, POOL_TOKEN, load_or_create
from gateway.telemetry import RequestTracing, Telemetry

_log = logging.getLogger(__name__)

_GC_THRESHOLD = 20_000
"""Allocations between two looks for cycles."""


def run(
    config: GatewayConfig,
    models: Sequence[ServedModel],
    replicas: Sequence[ReplicaAddress],
    billing: BillingConfig,
    data_dir: Path,
) -> None:
    """Serve until SIGTERM or SIGINT, then stop gracefully: requests in flight end, usage records are durable.

    ``data_dir`` holds ``secrets/`` (the pool token and the secret that cache salts derive from, made on first
    use), ``spool/`` and, with the default database, the store.

    Raises:
        OSError: the port is taken or the data directory cannot be written.
        ValueError: the configuration contradicts itself; the message names the key.
        billing.store.StoreError, billing.spool.SpoolError: the ledger cannot be opened.
    """
    configure_logging(config.telemetry.log_level)
    uvloop.run(_serve_until_signalled(config, models, replicas, billing, data_dir))


async def _serve_until_signalled(
    config: GatewayConfig,
    models: Sequence[ServedModel],
    replicas: Sequence[ReplicaAddress],
    billing: BillingConfig,
    data_dir: Path,
) -> None:
    loop = asyncio.get_running_loop()
    stopping = asyncio.Event()
    for number in (signal.SIGTERM, signal.SIGINT):
        loop.add_signal_handler(number, stopping.set)
    gateway = Gateway(config, models, replicas, billing, data_dir)
    await gateway.start()
    _calm_garbage_collector()
    try:
        await stopping.wait()
    finally:
        await gateway.stop()


def _calm_garbage_collector() -> None:
    """Requests in flight are many young objects that soon die by reference count; looking through all of
    them, and through the modules, after every few hundred allocations costs a tenth of the edge's time.
    """
    gc.collect()
    gc.freeze()
    gc.set_threshold(_GC_THRESHOLD, 20, 50)


class Gateway:
    """The edge as one object. Made and used inside a running event loop; start once, stop once."""

    def __init__(
        self,
        config: GatewayConfig,
        models: Sequence[ServedModel],
        replicas: Sequence[ReplicaAddress],
        billing: BillingConfig,
        data_dir: Path,
        *,
        tracing: RequestTracing | None = None,
    ) -> None:
        """Opens the ledger. Raises as :func:`run` does, apart from the port."""
        loop = asyncio.get_running_loop()
        self._config = config
        self._is_accepting = False
        self._background: set[asyncio.Task[None]] = set()
        catalog = Catalog(models)
        rate_book = RateBook.from_config(billing)
        _check_rates(models, rate_book)
        secrets_dir = data_dir / "secrets"
        pool_headers = (
            ("content-type", "application/json"),
            ("authorization", f"Bearer {load_or_create(secrets_dir, POOL_TOKEN)}"),
        )
        salts = SaltMaker(load_or_create(secrets_dir, CACHE_SALT_SECRET))

        self._store = Store.open(billing.database_url_in(data_dir))
        self._spool = Spool(data_dir / "spool", billing.spool)
        self._poster = Poster(self._spool, self._store, rate_book)

        self.metrics = GatewayMetrics(config.telemetry.max_account_labels)
        self._telemetry = _telemetry(config, self.metrics, tracing, loop)
        self._journal = UsageJournal(self._spool, config.metering, self.metrics.observe_commit)
        self._client = ReplicaClient(config.upstream)
        self.table = ReplicaTable(replicas, config.routing, config.health)
        self._prober = HealthProber(self.table, self._client, config.health)
        known = KnownRequests(config.metering.max_known_requests)
        self._reconciler = Reconciler(
            self._client,
            pool_headers,
            self._store,
            known,
            self._journal.commit,
            timeout_s=config.upstream.first_byte_timeout_s,
        )
        predictions = CachePredictions(config.routing.max_tracked_sessions)
        authenticator = Authenticator(AccountDirectory(self._store), config.auth, loop.time)
        self._pipeline = Pipeline(
            authenticator=authenticator,
            catalog=catalog,
            limits=AccountLimits(config.limits, time.monotonic_ns),
            salts=salts,
            dispatcher=Dispatcher(
                self.table,
                self._client,
                _ranking(config),
                predictions,
                pool_headers,
                max_attempts=config.routing.max_attempts,
                whole_answer_timeout_s=config.upstream.request_timeout_s,
                clock=loop.time,
            ),
            predictions=predictions,
            client=self._client,
            replica_headers=pool_headers,
            outbound_headers=self._telemetry.outbound_headers,
            rate_book=rate_book,
            journal=self._journal,
            known=known,
            abort_usage_wait_s=config.metering.abort_usage_wait_s,
            clock=loop.time,
        )
        max_choices = config.limits.max_choices
        inference = InferenceRoutes(
            self._pipeline,
            self._telemetry,
            {"run": NativeForm(max_choices), "v1": OpenAIForm(max_choices)},
            loop.time,
        )
        ops = OpsRoutes(
            self.table,
            catalog,
            authenticator,
            self.metrics,
            is_accepting=lambda: self._is_accepting,
            started_at=int(time.time()),
        )
        self.server = EdgeServer(
            config, inference.match, _application(config, inference, ops), refusal=edge_refusal
        )

    async def start(self) -> None:
        """Post what an earlier process left, find ready replicas, and listen.

        Raises:
            OSError: the port is taken.
        """
        self.metrics.watch(self.table, lambda: self._journal.num_pending, lambda: self._spool.num_unposted)
        await asyncio.to_thread(self._poster.drain)
        self._poster.start()
        self._journal.start()
        self.table.on_ready(self._follow_usages)
        await self._prober.start()
        await self.server.start()
        self._is_accepting = True
        _log.info("listening on %s:%d", self._config.host, self.server.port)

    async def stop(self) -> None:
        """End requests in flight within the grace, then write, post and export everything that waits."""
        self._is_accepting = False
        await self.server.stop()
        await self._pipeline.settle_all()
        await self._prober.stop()
        for task in self._background:
            task.cancel()
        await asyncio.gather(*self._background, return_exceptions=True)
        await self._client.close()
        await self._journal.stop()
        num_left = await asyncio.to_thread(self._poster.stop)
        if num_left:
            _log.warning("%d usage records wait in the spool for the next start", num_left)
        self._spool.close()
        self._store.close()
        await asyncio.to_thread(self._telemetry.close)

    def _follow_usages(self, replica: Replica) -> None:
        task = asyncio.create_task(self._reconciler.follow(replica))
        self._background.add(task)
        task.add_done_callback(self._background.discard)


def _application(config: GatewayConfig, inference: InferenceRoutes, ops: OpsRoutes) -> web.Application:
    """All routes on aiohttp; the hot ones usually go past it."""

    async def infer(request: web.Request) -> web.StreamResponse:
        path, _, _ = request.raw_path.partition("?")
        handler = inference.match(path)
        if handler is None:
            return await ops.no_route(request)
        return await serve_exchange(request, handler, config)

    app = web.Application(client_max_size=config.max_body_bytes, middlewares=[envelop_errors])
    app.router.add_post("/client/v4/accounts/{resource:.*}", infer)
    ops.add_to(app.router)
    return app


def _telemetry(
    config: GatewayConfig,
    metrics: GatewayMetrics,
    tracing: RequestTracing | None,
    loop: asyncio.AbstractEventLoop,
) -> Telemetry:
    access_log = None
    if config.telemetry.access_log:
        access_log = AccessLog(stderr_writer(), loop)
    if tracing is None and config.telemetry.otlp_endpoint:
        from gateway.tracing import tracing_from_config  # costs memory and time that only exporting is worth

        tracing = tracing_from_config(config.telemetry)
    return Telemetry(metrics, access_log, tracing, loop.time)


def _ranking(config: GatewayConfig) -> Ranking[Replica]:
    return RingRanking() if config.routing.policy == "ring" else rank_by_rendezvous


def _check_rates(models: Sequence[ServedModel], rate_book: RateBook) -> None:
    now_us = time.time_ns() // 1000
    for model in models:
        if not rate_book.covers(model.id, now_us):
            raise ValueError(
                f"billing.rate_cards: no card of {model.id} is in force; every served model needs one"
            )
