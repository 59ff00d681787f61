"""Routes for operators and clients' discovery: health, readiness, metrics, the model list; and every wrong
path.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Awaitable, Callable
from http import HTTPStatus

import msgspec
from aiohttp import web

from billing.usage import new_request_id
from gateway.auth import Authenticator
from gateway.call import ray_of
from gateway.catalog import Catalog
from gateway.config import EMBEDDINGS_TASK
from gateway.edge.aiohttp_exchange import BodiesFullError
from gateway.edge.exchange import Headers
from gateway.errors import (
    Reason,
    Refusal,
    bodies_full,
    method_not_allowed,
    no_messages_api,
    no_route,
    too_large,
)
from gateway.metrics import GatewayMetrics
from gateway.replicas import ReplicaTable
from gateway.wire.catalog import author_of
from gateway.wire.openai import encode_model_list
from gateway.wire.openai_errors import encode_openai_refusal
from gateway.wire.workers_ai import encode_refusal, parse_target

_AiohttpHandler = Callable[[web.Request], Awaitable[web.StreamResponse]]

TAKES_ANY_PATH = ("inference", "no-route")
"""Names of routes whose path says nothing."""

_log = logging.getLogger(__name__)

_JSON = "application/json"
_PLAIN_V1 = "/v1/"
_MESSAGES_API = "/v1/messages"
_EDGE_REASONS = {413: Reason.TOO_LARGE, 408: Reason.TIMEOUT, 503: Reason.CAPACITY}


class OpsRoutes:
    """Handlers of the aiohttp application, apart from inference."""

    def __init__(
        self,
        table: ReplicaTable,
        catalog: Catalog,
        authenticator: Authenticator,
        metrics: GatewayMetrics,
        *,
        is_accepting: Callable[[], bool],
        ledger_trouble: Callable[[], str],
        started_at: int,
    ) -> None:
        self._table = table
        self._catalog = catalog
        self._authenticator = authenticator
        self._metrics = metrics
        self._is_accepting = is_accepting
        self._ledger_trouble = ledger_trouble
        self._started_at = started_at

    def add_to(self, router: web.UrlDispatcher) -> None:
        """Add the routes; the last one answers every path that no other took."""
        router.add_get("/health", self.health)
        router.add_get("/ready", self.ready)
        router.add_get("/metrics", self.metrics)
        router.add_get("/client/v4/accounts/{account_id}/ai/v1/models", self.models)
        router.add_get("/v1/models", self.models)
        router.add_route("*", "/{path:.*}", self.no_route, name="no-route")

    async def health(self, request: web.Request) -> web.Response:
        """200 as long as the process answers."""
        return web.json_response({"status": "ok"})

    async def ready(self, request: web.Request) -> web.Response:
        """200 when all is well: some replica is ready, usage is posted, and the gateway is not stopping."""
        trouble = self._ledger_trouble()
        is_ready = self._is_accepting() and self._has_ready_replica() and not trouble
        replicas = {
            replica.id: {"health": replica.health, "num_in_flight": replica.num_in_flight}
            for replica in self._table.replicas
        }
        status = "ready" if is_ready else "unavailable"
        body = msgspec.json.encode({"status": status, "ledger": trouble or "ok", "replicas": replicas})
        return web.Response(status=200 if is_ready else 503, body=body, content_type=_JSON)

    def _has_ready_replica(self) -> bool:
        """Whether any model that generates text can be served; others come and go without the gateway."""
        texts = [model.id for model in self._catalog.models if model.task != EMBEDDINGS_TASK]
        serving = (self._table.serving(model) for model in texts)
        return any(replica.health == "ready" for replicas in serving for replica in replicas)

    async def metrics(self, request: web.Request) -> web.Response:
        """Prometheus text."""
        return web.Response(
            body=self._metrics.export(), headers={"content-type": "text/plain; version=0.0.4"}
        )

    async def models(self, request: web.Request) -> web.Response:
        """The OpenAI model list, an extension: ids and aliases that requests may name."""
        try:
            await self._authenticator.authenticate(
                request.headers.get("authorization"), request.match_info.get("account_id", "")
            )
        except Refusal as refusal:
            return _refusal_response(refusal)
        names = [(name, author_of(self._catalog.find(name).id)) for name in self._catalog.names()]
        return web.Response(body=encode_model_list(names, self._started_at), content_type=_JSON)

    async def no_route(self, request: web.Request) -> web.Response:
        path, _, _ = request.raw_path.partition("?")
        if parse_target(path) is not None:
            refusal = method_not_allowed(request.method, "POST")
        elif allowed := await _allowed_methods(request):
            refusal = method_not_allowed(request.method, ", ".join(sorted(allowed)))
        elif path.endswith(_MESSAGES_API):
            refusal = no_messages_api()
        else:
            refusal = no_route(path)
        return _refusal_response(refusal, path=path)


@web.middleware
async def envelop_errors(request: web.Request, handler: _AiohttpHandler) -> web.StreamResponse:
    """Refusals and aiohttp's own errors in the form that clients of Workers AI expect."""
    try:
        return await handler(request)
    except Refusal as error:
        refusal, status = error, error.reason.status
    except web.HTTPRequestEntityTooLarge:
        refusal, status = too_large(request.client_max_size), Reason.TOO_LARGE.status
    except BodiesFullError:
        refusal, status = bodies_full(), 503
    except web.HTTPNotFound as error:
        refusal, status = no_route(request.raw_path), error.status
    except web.HTTPException as error:
        refusal, status = Refusal(Reason.BAD_INPUT, error.text or error.reason), error.status
    except Exception:  # noqa: BLE001 - the top guard: every request gets an answer in the usual form
        _log.exception("%s %s failed", request.method, request.path)
        refusal, status = Refusal(Reason.INTERNAL, "Internal error"), Reason.INTERNAL.status
    return _refusal_response(refusal, status, path=request.path)


def edge_refusal(path: str, status: int, message: str) -> tuple[Headers, bytes]:
    """Answers that the edge gives before any handler: malformed, too large, too slow, too many
    connections.
    """
    refusal = Refusal(_EDGE_REASONS.get(status, Reason.BAD_INPUT), f"{message[:1].upper()}{message[1:]}")
    request_id = _new_id()
    headers = [("content-type", _JSON), ("cf-ray", ray_of(request_id))]
    if status == HTTPStatus.SERVICE_UNAVAILABLE:
        headers.append(("retry-after", "1"))
    return headers, encode_refusal(refusal, request_id)


async def _allowed_methods(request: web.Request) -> set[str]:
    """Methods that some route takes at this path."""
    allowed: set[str] = set()
    for resource in request.app.router.resources():
        if resource.name not in TAKES_ANY_PATH:
            _, methods = await resource.resolve(request)
            allowed |= methods
    return allowed


def _refusal_response(refusal: Refusal, status: int | None = None, *, path: str = "") -> web.Response:
    """Below plain ``/v1`` in OpenAI's form."""
    request_id = _new_id()
    encode = encode_openai_refusal if path.startswith(_PLAIN_V1) else encode_refusal
    body = encode(refusal, request_id)
    headers = {"cf-ray": ray_of(request_id), **dict(refusal.headers)}
    if refusal.retry_after_s is not None:
        headers["retry-after"] = str(refusal.retry_after_s)
    return web.Response(
        status=status or refusal.reason.status, body=body, content_type=_JSON, headers=headers
    )


def _new_id() -> str:
    return new_request_id(time.time_ns() // 1000)
