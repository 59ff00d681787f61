"""Batches among the requests of the native routes: what is one is answered here, all else goes on."""

from __future__ import annotations

from gateway.auth import Authenticator
from gateway.batches.native import NativeBatches, may_be_batch, wants_queue
from gateway.call import Call
from gateway.wire.binding import decode_run
from gateway.wire.workers_ai import envelop

_SURFACES = frozenset(("run", "binding"))


class BatchCalls:
    """See the module."""

    def __init__(self, batches: NativeBatches, authenticator: Authenticator) -> None:
        self._batches = batches
        self._authenticator = authenticator

    def may_concern(self, call: Call) -> bool:
        """Whether :meth:`answer` should be asked."""
        return call.surface.name in _SURFACES and "content-encoding" not in call.exchange.headers

    async def answer(self, call: Call) -> bool:
        """Answer the call if it submits or polls a batch; returns whether it does. Raises Refusal."""
        exchange, surface = call.exchange, call.surface.name
        body, is_queued = exchange.body, wants_queue(exchange.query)
        if not (is_queued or may_be_batch(body)):
            return False
        authorization = exchange.headers.get("authorization")
        principal = await self._authenticator.authenticate(authorization, call.account_id)
        if surface == "binding":
            run = decode_run(body, exchange.query)
            body = run.inputs
            is_queued = bool(run.options and run.options.queue_request)
        native = self._batches.claims(body, is_queued=is_queued)
        if native is None:
            return False
        call.account_id = principal.account_id
        result = await self._batches.answer(native, body, principal, call.path_model, call.request_id)
        call.http_status = 200
        headers = (
            ("content-type", "application/json"),
            ("cf-ai-req-id", call.request_id),
            ("cf-ray", call.ray),
        )
        exchange.respond(200, headers, result if surface == "binding" else envelop(result))
        return True
