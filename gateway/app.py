"""Composition root of the edge: builds every object once, wires the routes, starts and stops."""

from __future__ import annotations

import asyncio
import gc
import logging
import signal
import sys
import time
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path

import uvloop

from billing.accounts import Principal
from billing.budgets import BudgetBook
from billing.config import BillingConfig
from billing.daily_neurons import used_neurons
from billing.rates import RateBook
from billing.receipt_keys import KeyRing
from billing.savings import price_lists
from billing.store import Store
from gateway.application import Routes, application
from gateway.auth import Authenticator, SaltMaker
from gateway.batches.assembly import BatchAssembly
from gateway.batches.jobs import NATIVE_ENDPOINT
from gateway.batches.runner import DeferredJournal, GivenCallers
from gateway.books import Books
from gateway.budget_leases import BudgetLeases
from gateway.budgets import Budgets
from gateway.catalog import Catalog
from gateway.client import ReplicaClient
from gateway.config import (
    EMBEDDINGS_TASK,
    GatewayConfig,
    ImagesConfig,
    LimitsConfig,
    ReplicaAddress,
    ServedModel,
)
from gateway.dashboard.building import build_dashboard
from gateway.dispatch import Dispatcher
from gateway.edge.admission import BodyBudget
from gateway.edge.server import EdgeServer
from gateway.handlers.ai_gateway import AiGatewayRoutes
from gateway.handlers.analytics import UsageRoutes
from gateway.handlers.catalog import CatalogRoutes
from gateway.handlers.graphql import GraphQLRoutes
from gateway.handlers.identity import IdentityRoutes
from gateway.handlers.inference import InferenceRoutes
from gateway.handlers.openapi import OpenAPIRoute
from gateway.handlers.ops import OpsRoutes, edge_refusal
from gateway.handlers.receipts import ReceiptRoutes
from gateway.handlers.registrations import RegistrationRoutes
from gateway.handlers.savings import SavingsRoutes
from gateway.handlers.tomarkdown import MarkdownRoutes
from gateway.images.addresses import AddressGuard
from gateway.images.fetcher import ImageFetcher
from gateway.images.intake import ImageIntake
from gateway.inquiry import UsageInquiry
from gateway.limits import AccountLimits, Admission, Demand
from gateway.logs import AccessLog, configure_logging, stderr_writer
from gateway.markdown.converter import Converter
from gateway.metering import UsageJournal
from gateway.metrics import GatewayMetrics
from gateway.neurons import DailyNeurons, NeuronRefresher
from gateway.pipeline import Pipeline
from gateway.predictions import CachePredictions
from gateway.probes import HealthProber
from gateway.reading import UsageReader
from gateway.reconciliation import KnownRequests, Reconciler
from gateway.registrations import Registrations
from gateway.replicas import Replica, ReplicaTable
from gateway.routing import Ranking, RendezvousRanking, RingRanking
from gateway.secret_files import CACHE_SALT_SECRET, GATEWAY_ID, POOL_TOKEN, load_or_create
from gateway.splitting import Splitter
from gateway.surfaces import build_surfaces
from gateway.telemetry import RequestTracing, Telemetry

_log = logging.getLogger(__name__)

_GC_THRESHOLD = 20_000
"""Allocations between two looks for cycles."""
_SWITCH_INTERVAL_S = 0.0005
_LEVELS_WITH_ACCESS_LINES = frozenset(("debug", "info"))
_UNWRITABLE = "usage records cannot be written; requests are refused"


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
    _tune_interpreter()
    try:
        await stopping.wait()
    finally:
        await gateway.stop()


def _tune_interpreter() -> None:
    """Settings of this process that suit a server.

    Requests in flight are many young objects that soon die by reference count: looking through them, and
    through all modules, after every few hundred allocations costs a tenth of the edge's time. And the loop
    must not wait five milliseconds, the default, for a thread that posts records.
    """
    gc.collect()
    gc.freeze()
    gc.set_threshold(_GC_THRESHOLD, 20, 50)
    sys.setswitchinterval(_SWITCH_INTERVAL_S)


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
        self._catalog = Catalog(models)
        pool_token = load_or_create(data_dir / "secrets", POOL_TOKEN)
        self._replica_headers = (
            ("content-type", "application/json"),
            ("authorization", f"Bearer {pool_token}"),
        )
        self._salts = SaltMaker(load_or_create(data_dir / "secrets", CACHE_SALT_SECRET))
        self._books = Books(billing, data_dir)
        _check_rates(models, self._books.rate_book)
        self._authenticator = Authenticator(self._books.accounts, config.auth, loop.time)
        self.metrics = GatewayMetrics(config.telemetry.max_account_labels)
        self._telemetry = _telemetry(config, self.metrics, tracing, loop)
        self._known = KnownRequests(config.metering.max_known_requests)
        self._journal = UsageJournal(
            self._books.spool,
            config.metering,
            self.metrics.observe_commit,
            num_in_flight=lambda: self._known.num_running,
        )
        self._client = ReplicaClient(config.upstream)
        self._gateway_id = gateway_id = load_or_create(data_dir / "secrets", GATEWAY_ID)
        self.table = ReplicaTable(replicas, config.routing, config.health)
        self._prober = HealthProber(self.table, self._client, config.health)
        self._registrations = self._build_registrations(pool_token)
        self._reconciler = self._build_reconciler()
        self._neurons, self._neuron_refresher = _build_neurons(config.limits, billing, self._books.store)
        self._receipt_keys = KeyRing(self._books.store, data_dir / "secrets")
        self._budgets = Budgets(self._books.rate_book, lambda: self._budget_leases.want())
        self._budget_leases = self._build_budget_leases()
        self._reader = UsageReader(self._books.store, config.analytics)
        self._price_lists = price_lists(billing)
        self._dashboard = build_dashboard(
            config.dashboard,
            billing,
            data_dir,
            store=self._books.store,
            authenticator=self._authenticator,
            reader=self._reader,
            table=self.table,
            receipt_keys=self._receipt_keys,
            salt_for=self._salts.salt_for,
        )
        self._bodies = BodyBudget(config.max_buffered_body_bytes)
        embedding_models = [model.id for model in models if model.task == EMBEDDINGS_TASK]
        self._limits = AccountLimits(config.limits, time.monotonic_ns, embedding_models)
        self._pipeline = self._build_pipeline(loop.time)
        self._item_pipeline = self._build_pipeline(loop.time, is_for_items=True)
        self._surfaces = build_surfaces(self._catalog, config.limits)
        self._batches = self._build_batches(gateway_id)
        self.server = self._build_server(loop.time)

    def _build_reconciler(self) -> Reconciler:
        return Reconciler(
            self._client,
            self._replica_headers,
            self._books.store,
            self._known,
            self._journal.commit,
            gateway_id=self._gateway_id,
            timeout_s=self._config.upstream.idle_timeout_s,
        )

    def _build_budget_leases(self) -> BudgetLeases:
        return BudgetLeases(
            self._budgets,
            BudgetBook(self._books.store),
            self._gateway_id,
            self._config.budgets,
            left_over=self._books.left_over,
            is_all_posted=lambda: not self._books.spool.num_unposted,
        )

    def _build_pipeline(self, clock: Callable[[], float], *, is_for_items: bool = False) -> Pipeline:
        """The one request path. Items of batches were admitted when they were submitted, and their records
        are written with their results; nobody need be asked for the counts of one that is broken off.
        """
        config = self._config
        predictions = CachePredictions(config.routing.max_tracked_sessions)
        dispatcher = Dispatcher(
            self.table,
            self._client,
            Splitter(self._build_ranking(), self._build_ranking(), predictions, config.routing),
            predictions,
            self._replica_headers,
            max_attempts=config.routing.max_attempts,
            whole_answer_timeout_s=config.upstream.request_timeout_s,
            clock=clock,
        )
        inquiry = UsageInquiry(
            self._client, self._replica_headers, abort_wait_s=config.metering.abort_usage_wait_s
        )
        if is_for_items:
            inquiry.close()
        return Pipeline(
            authenticator=GivenCallers() if is_for_items else self._authenticator,
            catalog=self._catalog,
            limits=self._limits,
            admission=Admission((*(() if is_for_items else (self._limits,)), self._neurons, self._budgets)),
            neurons=self._neurons,
            images=_build_intake(config.images, self._bodies),
            salts=self._salts,
            dispatcher=dispatcher,
            predictions=predictions,
            inquiry=inquiry,
            outbound_headers=self._telemetry.outbound_headers,
            rate_book=self._books.rate_book,
            journal=DeferredJournal() if is_for_items else self._journal,
            known=self._known,
            gateway_id=self._gateway_id,
        )

    def _build_registrations(self, pool_token: str) -> Registrations | None:
        config = self._config.registration
        if not config.is_enabled:
            return None
        models = [model.id for model in self._catalog.models]
        return Registrations(
            self.table, config, pool_token, models, clock=time.monotonic, wall_clock=time.time
        )

    def _build_ranking(self) -> Ranking[Replica]:
        return RingRanking() if self._config.routing.policy == "ring" else RendezvousRanking()

    def _build_batches(self, owner: str) -> BatchAssembly:
        surfaces = self._surfaces
        return BatchAssembly(
            self._config.batches,
            owner,
            store=self._books.store,
            rate_book=self._books.rate_book,
            catalog=self._catalog,
            authenticator=self._authenticator,
            admit=self._admit_submission,
            pipeline=self._item_pipeline,
            surfaces={
                NATIVE_ENDPOINT: surfaces["run"],
                "/v1/chat/completions": surfaces["v1"],
                "/v1/embeddings": surfaces["embeddings"],
                "/v1/responses": surfaces["responses"],
            },
            table=self.table,
            ranking=self._build_ranking(),  # its own: it is used in threads
            client=self._client,
            replica_headers=self._replica_headers,
            telemetry=self._telemetry,
        )

    def _admit_submission(self, principal: Principal, model: str) -> None:
        """Count a submission of a batch as one request. Raises Refusal."""
        now_us = time.time_ns() // 1000
        hold = self._limits.reserve(Demand(principal.account_id, principal.token_id, model, now_us, 0, 0))
        hold.served()
        hold.release()

    def _build_server(self, clock: Callable[[], float]) -> EdgeServer:
        config = self._config
        inference = InferenceRoutes(
            self._pipeline, self._batches.calls, self._telemetry, self._surfaces, clock
        )
        started_at = int(time.time())
        ops = OpsRoutes(
            self.table,
            self._catalog,
            self._authenticator,
            self.metrics,
            is_accepting=lambda: self._is_accepting,
            ledger_trouble=self._ledger_trouble,
            started_at=started_at,
        )
        routes = [*self._build_analytics(), *self._build_plain_routes(started_at), *self._batches.routes]
        return EdgeServer(
            config,
            inference.match,
            application(config, inference, ops, self._bodies, routes),
            refusal=edge_refusal,
            early_check=inference.is_wanted,
            bodies=self._bodies,
        )

    def _ledger_trouble(self) -> str:
        if self._journal.has_failed:
            return _UNWRITABLE
        return self._books.trouble or ("" if self._budgets.are_known else "budgets are not known yet")

    def _build_analytics(self) -> list[Routes]:
        """What reads the sums of usage."""
        config, currency = self._config.analytics, self._books.rate_book.currency
        return [
            UsageRoutes(self._authenticator, self._reader, config, currency),
            SavingsRoutes(self._authenticator, self._reader, config, self._price_lists, currency),
            GraphQLRoutes(self._authenticator, self._reader, config),
            *self._dashboard,
            AiGatewayRoutes(self._authenticator, self._reader, self._public_url),
        ]

    def _build_plain_routes(self, started_at: int) -> list[Routes]:
        """Routes that lead to no model."""
        config, books, authenticator = self._config, self._books, self._authenticator
        return [
            *([RegistrationRoutes(self._registrations)] if self._registrations is not None else []),
            CatalogRoutes(
                self._catalog,
                books.rate_book,
                authenticator,
                started_at=started_at,
                takes_batches=config.batches.is_enabled,
            ),
            IdentityRoutes(authenticator, books.accounts.find_account),
            OpenAPIRoute(),
            ReceiptRoutes(
                authenticator,
                self._reader,
                self._receipt_keys,
                salt_for=self._salts.salt_for,
                currency=books.rate_book.currency,
                clock=time.monotonic,
            ),
            MarkdownRoutes(
                authenticator,
                Converter(config.markdown),
                config.markdown,
                self._bodies,
                max_body_bytes=config.max_body_bytes,
            ),
        ]

    def _public_url(self) -> str:
        config = self._config
        host = "127.0.0.1" if config.host in ("0.0.0.0", "::", "") else config.host
        host = f"[{host}]" if ":" in host else host
        return config.public_url.rstrip("/") or f"http://{host}:{self.server.port}"

    async def start(self) -> None:
        """Post what an earlier process left, find ready replicas, and listen; undone when that fails.

        Raises:
            OSError: the port is taken.
        """
        spool = self._books.spool
        self.metrics.watch(self.table, lambda: self._journal.num_pending, lambda: spool.num_unposted)
        self.table.on_ready(self._follow_usages)
        try:
            await asyncio.to_thread(self._books.start)
            await self._budget_leases.start()
            if self._neuron_refresher is not None:
                await self._neuron_refresher.start()
            self._journal.start()
            await self._prober.start()
            if self._registrations is not None:
                self._registrations.start()
            await self.server.start()
            self._batches.worker.start()
        except BaseException:
            await self.stop()
            raise
        self._is_accepting = True
        _log.info("listening on %s:%d", self._config.host, self.server.port)

    async def stop(self) -> None:
        """End requests in flight within the grace, then write, post and export everything that waits."""
        self._is_accepting = False
        await self.server.stop()
        await self._batches.worker.stop()
        for pipeline in (self._pipeline, self._item_pipeline):
            await pipeline.settle_all(self._config.metering.stop_usage_wait_s)
        if self._registrations is not None:
            await self._registrations.stop()
        await self._prober.stop()
        if self._neuron_refresher is not None:
            await self._neuron_refresher.stop()
        for task in self._background:
            task.cancel()
        await asyncio.gather(*self._background, return_exceptions=True)
        await self._client.close()
        await self._journal.stop()
        await asyncio.to_thread(self._reader.close)
        await self._budget_leases.stop()
        await asyncio.to_thread(self._books.close, self._budget_leases.release)
        await asyncio.to_thread(self._telemetry.close)

    def _follow_usages(self, replica: Replica) -> None:
        task = asyncio.create_task(self._reconciler.follow(replica))
        self._background.add(task)
        task.add_done_callback(self._background.discard)


def _build_neurons(
    limits: LimitsConfig, billing: BillingConfig, store: Store
) -> tuple[DailyNeurons, NeuronRefresher | None]:
    """Where nobody has free neurons there is nothing to look up."""

    def stops(account_id: str) -> bool:
        return limits.accounts.get(account_id, limits.default).stops_at_free_neurons

    neurons = DailyNeurons(billing.free_neurons_of, stops)
    accounts = {*billing.accounts, *limits.accounts}
    if not any(billing.free_neurons_of(each) or stops(each) for each in ("", *accounts)):
        return neurons, None
    read = partial(used_neurons, store)
    return neurons, NeuronRefresher(neurons, read, refresh_s=limits.neurons_refresh_s)


def _build_intake(config: ImagesConfig, bodies: BodyBudget) -> ImageIntake:
    try:
        guard = AddressGuard(config.allowed_networks)
    except ValueError as error:
        raise ValueError(f"gateway.images.allowed_networks: {error}") from error
    return ImageIntake(config, ImageFetcher(config, guard), bodies)


def _telemetry(
    config: GatewayConfig,
    metrics: GatewayMetrics,
    tracing: RequestTracing | None,
    loop: asyncio.AbstractEventLoop,
) -> Telemetry:
    access_log = None
    if config.telemetry.access_log and config.telemetry.log_level in _LEVELS_WITH_ACCESS_LINES:
        access_log = AccessLog(stderr_writer(), loop)
    if tracing is None and config.telemetry.otlp_endpoint:
        from gateway.tracing import tracing_from_config  # costs memory and time that only exporting is worth

        tracing = tracing_from_config(config.telemetry)
    return Telemetry(metrics, access_log, tracing, loop.time)


def _check_rates(models: Sequence[ServedModel], rate_book: RateBook) -> None:
    now_us = time.time_ns() // 1000
    for model in models:
        if not rate_book.covers(model.id, now_us):
            raise ValueError(
                f"billing.rate_cards: no card of {model.id} is in force; every served model needs one"
            )
