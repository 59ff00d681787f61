"""The routes beside completions: health, figures, recent usages, draining, aborts, metrics."""

from __future__ import annotations

import msgspec
from aiohttp import web

from backend import metrics as prometheus
from backend.config import BackendConfig
from backend.http.calls import Calls
from backend.http.errors import bad_request
from backend.http.state import ReplicaState
from backend.recent_usages import RecentUsageLog
from backend.wire import AbortRequest, AbortResult, Health, ReplicaStats

_encode = msgspec.json.Encoder().encode


class Operations:
    """Handlers for operators, supervisors and the gateway's bookkeeping."""

    def __init__(
        self,
        config: BackendConfig,
        state: ReplicaState,
        calls: Calls,
        usages: RecentUsageLog,
        metrics: prometheus.ReplicaMetrics,
    ) -> None:
        self._config = config
        self._state = state
        self._calls = calls
        self._usages = usages
        self._metrics = metrics

    async def health(self, http: web.Request) -> web.Response:
        """200 when requests are taken, 503 while starting or draining."""
        return self._health_response(200 if self._state.status == "ready" else 503)

    async def drain(self, http: web.Request) -> web.Response:
        self._state.drain()
        return self._health_response(200)

    async def resume(self, http: web.Request) -> web.Response:
        self._state.resume()
        return self._health_response(200)

    async def stats(self, http: web.Request) -> web.Response:
        stats = self._state.read_stats()
        started_at = self._usages.started_at
        model = self._config.model.served_as
        if stats is None or self._state.engine is None:
            return _json(ReplicaStats(replica_id=self._config.replica_id, model=model, started_at=started_at))
        info = self._state.engine.info
        return _json(
            ReplicaStats(
                replica_id=self._config.replica_id,
                model=model,
                started_at=started_at,
                num_running=stats.num_running,
                num_waiting=stats.num_waiting,
                num_blocks=stats.num_blocks,
                num_free_blocks=stats.num_free_blocks,
                num_cached_blocks=stats.num_cached_blocks,
                block_size=info.block_size,
                max_model_len=info.max_model_len,
                prompt_tokens=stats.prompt_tokens,
                cached_prompt_tokens=stats.cached_prompt_tokens,
                completion_tokens=stats.completion_tokens,
                num_preemptions=stats.num_preemptions,
                num_requests=stats.num_requests,
                num_aborts=stats.num_aborts,
            )
        )

    async def usages(self, http: web.Request) -> web.Response:
        """One page of recent usages after the sequence number in the query, or the end of one request.

        Raises:
            ReplicaError: 400 when ``after`` is not a whole number.
        """
        if (request_id := http.query.get("request_id")) is not None:
            return _json(self._usages.page_of(request_id))
        after = http.query.get("after", "0")
        if not after.isascii() or not after.isdigit() or len(after) > 18:
            raise bad_request("after", "must be a whole number")
        return _json(self._usages.page(int(after)))

    async def abort(self, http: web.Request) -> web.Response:
        """Stop a request; answers when it is over.

        Raises:
            ReplicaError: 400 when the body is not an abort request.
        """
        try:
            request = msgspec.json.decode(await http.read(), type=AbortRequest)
        except msgspec.DecodeError as error:
            raise bad_request("request_id", str(error)) from error
        usage = await self._calls.abort(request.request_id)
        return _json(AbortResult(request_id=request.request_id, usage=usage))

    async def metrics(self, http: web.Request) -> web.Response:
        return web.Response(body=self._metrics.expose(), headers={"Content-Type": prometheus.CONTENT_TYPE})

    def _health_response(self, status: int) -> web.Response:
        status_word, progress = self._state.status, self._state.progress
        transfers = self._state.transfers
        health = Health(
            status=status_word,
            replica_id=self._config.replica_id,
            model=self._config.model.served_as,
            stage=progress.stage if status_word == "starting" else "",
            fraction=progress.fraction if status_word == "starting" else 1.0,
            role=self._config.role,
            transfer="" if transfers is None else transfers.address,
            can_fetch=transfers is not None and transfers.fetcher is not None,
            kv_room_tokens=self._kv_room_tokens(),
        )
        return _json(health, status)

    def _kv_room_tokens(self) -> int:
        stats, engine = self._state.read_stats(), self._state.engine
        if stats is None or engine is None or not stats.num_blocks:
            return -1
        return (stats.num_free_blocks + stats.num_cached_blocks) * engine.info.block_size


def _json(value: object, status: int = 200) -> web.Response:
    return web.Response(status=status, body=_encode(value), content_type="application/json")
