"""The one request path: auth -> decode -> limits -> route -> stream -> meter -> end.

Read :meth:`Pipeline.serve` from top to bottom. What it promises:

* One usage record per served request, durable before the client sees the end of its answer (the final usage
  chunk, ``[DONE]``, or the body of an answer in one piece). If it cannot be made durable the answer is not
  ended cleanly.
* A client that leaves frees the replica at once, and pays for what was generated until then.
* A replica that is lost after the first byte gives an error event and a closed connection, never a clean
  short answer.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Coroutine
from typing import Any, Protocol, cast

import msgspec

from backend.wire import TokenUsage
from billing.accounts import Principal
from billing.rates import RateBook
from billing.usage import InvalidUsageError, Status, UsageRecord
from gateway.auth import SaltMaker
from gateway.call import Answer, Call, Interruption
from gateway.catalog import Catalog
from gateway.config import EMBEDDINGS_TASK
from gateway.demand import demand_of
from gateway.dispatch import Dispatcher, start_stream
from gateway.errors import Refusal, aborted, bad_input, body_encoding, metering_unavailable, no_capacity
from gateway.images.intake import ImageIntake
from gateway.inquiry import UsageInquiry
from gateway.limits import AccountLimits, Admission
from gateway.metering import MeteringUnavailableError
from gateway.neurons import DailyNeurons
from gateway.predictions import CachePredictions
from gateway.reconciliation import KnownRequests
from gateway.records import estimate, plausible, record_of, usage_seen
from gateway.responses import completion_headers
from gateway.routing import derived_key
from gateway.wire.embeddings import EmbeddingsRequest
from gateway.wire.openai import encode_usage, error_frame
from gateway.wire.replica import BillingContext, encode_billing_context, encode_embeddings, encode_request
from gateway.wire.workers_ai import affinity_of, session_label

_log = logging.getLogger(__name__)


class CallerCheck(Protocol):
    """Who is calling; see :class:`gateway.auth.Authenticator`."""

    async def authenticate(self, authorization: str | None, account_id: str) -> Principal:
        """Raises Refusal."""


class Journal(Protocol):
    """Where usage records become durable; see :class:`gateway.metering.UsageJournal`."""

    @property
    def is_full(self) -> bool: ...

    @property
    def is_failing(self) -> bool: ...

    async def commit(self, record: UsageRecord) -> None:
        """Raises MeteringUnavailableError."""


class Pipeline:
    """Serves calls. Every part is given; ``outbound_headers`` are a call's further headers to replicas
    (tracing).
    """

    def __init__(
        self,
        *,
        authenticator: CallerCheck,
        catalog: Catalog,
        limits: AccountLimits,
        admission: Admission,
        neurons: DailyNeurons,
        images: ImageIntake,
        salts: SaltMaker,
        dispatcher: Dispatcher,
        predictions: CachePredictions,
        inquiry: UsageInquiry,
        outbound_headers: Callable[[Call], tuple[tuple[str, str], ...]],
        rate_book: RateBook,
        journal: Journal,
        known: KnownRequests,
        gateway_id: str,
    ) -> None:
        self._authenticator = authenticator
        self._catalog = catalog
        self._limits = limits
        self._admission = admission
        self._neurons = neurons
        self._images = images
        self._salts = salts
        self._dispatcher = dispatcher
        self._predictions = predictions
        self._inquiry = inquiry
        self._outbound_headers = outbound_headers
        self._rate_book = rate_book
        self._journal = journal
        self._known = known
        self._gateway_id = gateway_id
        self._unsettled: set[asyncio.Task[None]] = set()
        self._loop = asyncio.get_running_loop()

    async def serve(self, call: Call) -> None:
        """Answer the call's exchange.

        Raises:
            Refusal: the exchange was not started and should be answered with it.
        """
        exchange = call.exchange
        authorization = exchange.headers.get("authorization")
        call.principal = await self._authenticator.authenticate(authorization, call.account_id)
        call.account_id = call.principal.account_id
        encoding = exchange.headers.get("content-encoding")
        if encoding is not None and encoding != "identity":
            raise body_encoding(encoding)
        call.request = call.surface.decode(exchange.body, call.path_model, exchange.query)
        call.model = self._catalog.find(call.request.model)
        call.model_id = call.model.id
        _check_task(call)
        call.images = self._images.plan(call.request, call.model)
        if self._journal.is_full:
            raise no_capacity()
        if self._journal.is_failing:
            raise metering_unavailable()
        reservation = call.reservation = self._admission.reserve(demand_of(call))
        if call.surface.name == "v1":
            call.rate_headers = self._limits.headers(call.account_id, call.model.id)
        self._known.started(call.request_id)
        try:
            answer = await self._generate(call)
            reservation.served()
            if isinstance(answer, Answer):
                usage = await self._record_complete(call, answer)
                self._end(call, answer, usage)
            else:
                self._break_off(call, answer.code, answer.message)
                await asyncio.shield(self._keep(self._record_interrupted(call, answer.status)))
        finally:
            call.images.release()
            reservation.release()
            self._known.ended(call.request_id)

    async def admits(self, authorization: str | None, account_id: str) -> bool:
        """Whether :meth:`serve` would let this caller in; what it cannot find out it leaves to that."""
        try:
            await self._authenticator.authenticate(authorization, account_id)
        except Refusal:
            return False
        return True

    async def settle_all(self, max_inquiry_s: float) -> None:
        """Wait until the records of all interrupted requests are written (for the stop of the gateway).

        Counts that replicas have not given after ``max_inquiry_s`` are estimated.
        """
        if self._unsettled:
            await asyncio.wait(self._unsettled, timeout=max_inquiry_s)
        self._inquiry.close()
        while self._unsettled:
            await asyncio.wait(self._unsettled)

    # -- route and stream ----------------------------------------------------------------------------------

    async def _generate(self, call: Call) -> Answer | Interruption:
        """Let a replica answer; a stream's chunks reach the client meanwhile. Stops at once when the client
        leaves.
        """
        exchange, request, model = call.exchange, call.request, call.model
        call.session = affinity_of(exchange.headers, request.options) or request.prompt_cache_key or ""
        call.affinity_key = call.session or _derived_key(call)
        task = cast("asyncio.Task[None]", asyncio.current_task(self._loop))
        exchange.on_disconnect(lambda: _cancel(task))
        try:
            if call.images.remote:
                await self._images.fetch(call.images)
            body = self._encoded(call)
            return await self._dispatcher.answer(
                call, model.id, body, self._outbound_headers(call), request.rejects_if_busy
            )
        except asyncio.CancelledError:
            has_left = exchange.is_disconnected
            if call.num_attempts and not has_left:  # the gateway itself is being stopped
                self._keep(self._record_interrupted(call, "error"))
            if not has_left:
                raise
            task.uncancel()
            if not call.num_attempts:
                raise aborted() from None
            return Interruption(status="client_disconnected")
        finally:
            exchange.on_disconnect(None)

    def _encoded(self, call: Call) -> bytes:
        """The request for a replica."""
        request, model = call.request, call.model
        context = self._billing_context(call)
        if isinstance(request, EmbeddingsRequest):
            return encode_embeddings(
                request,
                model,
                request_id=call.request_id,
                billing_context=context,
                account_id=call.account_id,
            )
        return encode_request(
            request,
            model,
            messages=call.images.messages,
            request_id=call.request_id,
            cache_salt=self._salts.salt_for(call.account_id),
            billing_context=context,
            account_id=call.account_id,
        )

    def _billing_context(self, call: Call) -> str:
        return encode_billing_context(
            BillingContext(
                account_id=call.account_id,
                token_id=call.principal.token_id,
                model=call.model.id,
                requested_model=call.request.model,
                surface=call.surface.name,
                session=session_label(call.session),
                started_at_us=call.started_at_us,
                gateway_id=self._gateway_id,
            )
        )

    # -- meter ---------------------------------------------------------------------------------------------

    async def _record_complete(self, call: Call, answer: Answer) -> TokenUsage:
        """Make the record of a complete answer durable; returns the counts that it holds.

        Raises:
            Refusal: it could not be; a stream that was started has been ended with an error event.
        """
        has_left = call.exchange.is_disconnected
        status: Status = "client_disconnected" if has_left else "ok"
        try:
            usage = await self._commit(call, status, answer.usage, is_estimated=False)
        except MeteringUnavailableError as error:
            refusal = metering_unavailable()
            self._break_off(call, "metering_unavailable", refusal.message)
            raise refusal from error
        self._predictions.learn(call.account_id, call.affinity_key, call.replica.id, usage.prompt_tokens)
        return usage

    async def _record_interrupted(self, call: Call, status: Status) -> None:
        """Write the record of an answer that has no end: with the replica's counts, or marked estimates."""
        usage = usage_seen(call) or await self._inquiry.final_usage(call.replica, call.request_id)
        is_estimated = usage is None
        try:
            await self._commit(call, status, usage or estimate(call), is_estimated=is_estimated)
        except MeteringUnavailableError as error:
            _log.error("request %s: usage record not written: %s", call.request_id, error)

    async def _commit(
        self, call: Call, status: Status, usage: TokenUsage, *, is_estimated: bool
    ) -> TokenUsage:
        """Returns the counts that stand in the record. Raises MeteringUnavailableError."""
        try:
            record = record_of(call, status, usage, is_estimated=is_estimated)
        except InvalidUsageError as error:  # served all the same: no request may end without a record
            _log.error("request %s: the replica's usage cannot be true: %s", call.request_id, error)
            usage = plausible(usage)
            record = record_of(call, status, usage, is_estimated=True)
        charge = self._rate_book.price(record)
        num_free = self._neurons.draw(record.account_id, record.started_at_us, charge.neurons_e4)
        if num_free:
            record = msgspec.structs.replace(record, free_neurons_e4=num_free)
            charge = self._rate_book.price(record)
        call.record, call.charge = record, charge
        try:
            await self._journal.commit(record)
        except MeteringUnavailableError:
            self._neurons.give_back(record.account_id, record.started_at_us, charge.neurons_e4)
            raise
        call.reservation.settle(record, charge)
        return usage

    def _keep(self, work: Coroutine[Any, Any, None]) -> asyncio.Task[None]:
        """Run ``work`` to its end even when the request's own task is cancelled."""
        task = asyncio.create_task(work)
        self._unsettled.add(task)
        task.add_done_callback(self._unsettled.discard)
        return task

    # -- end -----------------------------------------------------------------------------------------------

    def _end(self, call: Call, answer: Answer, recorded: TokenUsage) -> None:
        """Let the end of a recorded answer out, with the counts of its record."""
        exchange, neurons_e4 = call.exchange, call.charge.neurons_e4
        form = call.request.answer_form or call.surface
        usage = encode_usage(recorded, neurons_e4)
        if answer.completion:
            call.http_status = 200
            body = form.completion(answer.completion, usage)
            exchange.respond(200, completion_headers(call, neurons_e4), body)
            return
        if not exchange.is_started:
            start_stream(call)
        exchange.finish(
            form.stream_end(answer.final_chunk, usage, includes_usage=call.request.includes_usage)
        )

    def _break_off(self, call: Call, code: str, message: str) -> None:
        """End a started stream with an error event and a closed connection, without ``[DONE]``."""
        if call.exchange.is_started:
            call.refused_for = code
            form = call.request.answer_form
            call.exchange.write(error_frame(code, message) if form is None else form.failure(code, message))
            call.exchange.abort()


def _check_task(call: Call) -> None:
    """Raises Refusal: 400, when the model does something else than what is asked for here."""
    model = call.model
    if (model.task == EMBEDDINGS_TASK) != isinstance(call.request, EmbeddingsRequest):
        raise bad_input("/model", f"{model.id} is for {model.task}, which this route is not")


def _derived_key(call: Call) -> str:
    request = call.request
    if isinstance(request, EmbeddingsRequest):
        return call.request_id  # replicas of embedding models remember nothing: spread the requests
    return derived_key(request.messages, request.body.tools)


def _cancel(task: asyncio.Task[None]) -> None:
    task.cancel()
