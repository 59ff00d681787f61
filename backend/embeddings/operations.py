"""Whether the replica takes requests, and the routes for operators, supervisors and gateways."""

from __future__ import annotations

import msgspec
from aiohttp import web

from backend import metrics as prometheus
from backend.embeddings.batcher import Batcher
from backend.embeddings.config import EmbeddingReplicaConfig
from backend.embeddings.encoder import Encoder
from backend.embeddings.jobs import Jobs
from backend.engine.messages import EngineStats
from backend.http.errors import bad_request, not_serving
from backend.http.state import Status
from backend.recent_usages import RecentUsageLog
from backend.wire import AbortRequest, AbortResult, Health, ReplicaStats

_MAX_DIGITS = 18


class EmbeddingState:
    """Ready from :meth:`become_ready` on, except while draining."""

    def __init__(self) -> None:
        self._encoder: Encoder | None = None
        self._batcher: Batcher | None = None
        self._is_draining = False

    @property
    def status(self) -> Status:
        if self._is_draining:
            return "draining"
        return "starting" if self._encoder is None else "ready"

    def become_ready(self, encoder: Encoder, batcher: Batcher) -> None:
        self._encoder, self._batcher = encoder, batcher

    def drain(self) -> None:
        """Take no more requests; those in progress go on."""
        self._is_draining = True

    def resume(self) -> None:
        self._is_draining = False

    def serving(self) -> tuple[Encoder, Batcher]:
        """What serves a request. Raises ReplicaError: 503 while starting or draining."""
        if self._is_draining or self._encoder is None or self._batcher is None:
            raise not_serving(self.status)
        return self._encoder, self._batcher

    def read_stats(self) -> EngineStats | None:
        """Figures in the form that metrics read: inputs stand for sequences."""
        batcher = self._batcher
        if batcher is None:
            return None
        return EngineStats(num_running=batcher.num_computing, num_waiting=batcher.num_waiting)


class EmbeddingOperations:
    """Handlers beside the one for embeddings."""

    def __init__(
        self,
        config: EmbeddingReplicaConfig,
        state: EmbeddingState,
        jobs: Jobs,
        usages: RecentUsageLog,
        metrics: prometheus.ReplicaMetrics,
    ) -> None:
        self._config = config
        self._state = state
        self._jobs = jobs
        self._usages = usages
        self._metrics = metrics

    def add_to(self, router: web.UrlDispatcher) -> None:
        router.add_post("/abort", self.abort)
        router.add_post("/drain", self.drain)
        router.add_post("/resume", self.resume)
        router.add_get("/health", self.health)
        router.add_get("/stats", self.stats)
        router.add_get("/usages", self.usages)
        router.add_get("/metrics", self.metrics)

    async def health(self, http: web.Request) -> web.Response:
        """200 when requests are taken, 503 while starting or draining."""
        return self._health(200 if self._state.status == "ready" else 503)

    async def drain(self, http: web.Request) -> web.Response:
        self._state.drain()
        return self._health(200)

    async def resume(self, http: web.Request) -> web.Response:
        self._state.resume()
        return self._health(200)

    async def stats(self, http: web.Request) -> web.Response:
        stats = self._state.read_stats() or EngineStats()
        return _json(
            ReplicaStats(
                replica_id=self._config.replica_id,
                model=self._config.served_as,
                started_at=self._usages.started_at,
                num_running=stats.num_running,
                num_waiting=stats.num_waiting,
                max_model_len=self._config.max_model_len,
            )
        )

    async def usages(self, http: web.Request) -> web.Response:
        """One page of recent usages, or the end of one request. Raises ReplicaError: 400."""
        if (request_id := http.query.get("request_id")) is not None:
            return _json(self._usages.page_of(request_id))
        after = http.query.get("after", "0")
        if not after.isascii() or not after.isdigit() or len(after) > _MAX_DIGITS:
            raise bad_request("after", "must be a whole number")
        return _json(self._usages.page(int(after)))

    async def abort(self, http: web.Request) -> web.Response:
        """Stop a request; answers when it is over. Raises ReplicaError: 400."""
        try:
            request = msgspec.json.decode(await http.read(), type=AbortRequest)
        except msgspec.DecodeError as error:
            raise bad_request("request_id", str(error)) from error
        usage = await self._jobs.abort(request.request_id)
        return _json(AbortResult(request_id=request.request_id, usage=usage))

    async def metrics(self, http: web.Request) -> web.Response:
        return web.Response(body=self._metrics.expose(), headers={"Content-Type": prometheus.CONTENT_TYPE})

    def _health(self, status: int) -> web.Response:
        config, state = self._config, self._state.status
        health = Health(
            status=state,
            replica_id=config.replica_id,
            model=config.served_as,
            stage="loading the model" if state == "starting" else "",
            fraction=0.0 if state == "starting" else 1.0,
        )
        return _json(health, status)


def _json(value: msgspec.Struct, status: int = 200) -> web.Response:
    return web.Response(status=status, body=msgspec.json.encode(value), content_type="application/json")
