"""The inference routes: gives each request an id, lets the pipeline serve it, turns any refusal into the
right answer.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Mapping

from billing.usage import RequestIds
from gateway.call import Call, SurfaceForm
from gateway.edge.exchange import Exchange, Handler
from gateway.errors import Reason, Refusal, no_route
from gateway.handlers.native_batches import BatchCalls
from gateway.pipeline import Pipeline
from gateway.responses import refusal_headers
from gateway.telemetry import Telemetry
from gateway.wire.binding import account_of, model_of
from gateway.wire.workers_ai import RunTarget, parse_target

_log = logging.getLogger(__name__)


class InferenceRoutes:
    """Handles the POST routes of all surfaces. Nothing an answer can go wrong with gets past this class."""

    def __init__(
        self,
        pipeline: Pipeline,
        batches: BatchCalls,
        telemetry: Telemetry,
        surfaces: dict[str, SurfaceForm],
        clock: Callable[[], float],
    ) -> None:
        self._pipeline = pipeline
        self._batches = batches
        self._telemetry = telemetry
        self._surfaces = surfaces
        self._clock = clock
        self._ids = RequestIds()

    def match(self, path: str) -> Handler | None:
        """The handler of a raw path, or None when it is no inference route."""
        return None if parse_target(path) is None else self.handle

    async def is_wanted(self, path: str, headers: Mapping[str, str]) -> bool:
        """Whether the body of a request should be read: not when :meth:`handle` refuses it anyway."""
        target = parse_target(path)
        if target is None or headers.get("content-encoding", "identity") != "identity":
            return False
        account_id, _ = _address(target, headers)
        return await self._pipeline.admits(headers.get("authorization"), account_id)

    async def handle(self, exchange: Exchange) -> None:
        """Answer one request, whatever happens."""
        target = parse_target(exchange.path)
        if target is None:
            raise no_route(exchange.path)
        account_id, model = _address(target, exchange.headers)
        started_at_us = time.time_ns() // 1000
        call = Call(
            exchange,
            self._surfaces[target.surface],
            account_id,
            model,
            self._clock(),
            started_at_us,
            self._ids.draw(started_at_us),
        )
        self._telemetry.started(call)
        try:
            if not (self._batches.may_concern(call) and await self._batches.answer(call)):
                await self._pipeline.serve(call)
        except Refusal as refusal:
            self._refuse(call, refusal)
        except Exception:  # noqa: BLE001 - the top guard: every request gets an answer
            _log.exception("request %s failed", call.request_id)
            self._refuse(call, Refusal(Reason.INTERNAL, "Internal error"))
        finally:
            self._telemetry.ended(call)

    def _refuse(self, call: Call, refusal: Refusal) -> None:
        self._telemetry.refused(refusal.reason)
        call.refused_for = call.refused_for or refusal.reason.word
        exchange = call.exchange
        if exchange.is_started:
            exchange.abort()
            return
        call.http_status = refusal.reason.status
        body = call.surface.refusal(refusal, call.request_id)
        exchange.respond(refusal.reason.status, refusal_headers(call, refusal), body)


def _address(target: RunTarget, headers: Mapping[str, str]) -> tuple[str, str | None]:
    """Whose request it is ("": that of the API token's account) and for which model."""
    if target.surface != "binding":
        return target.account_id, target.model
    return account_of(headers), model_of(headers)
