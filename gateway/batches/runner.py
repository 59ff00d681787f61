"""Runs one item through the pipeline and says what became of it."""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Protocol

import msgspec

from billing.accounts import Principal
from gateway.auth import RUN_PERMISSION
from gateway.batches.config import BatchesConfig
from gateway.batches.exchange import MemoryExchange
from gateway.batches.forms import ItemForm
from gateway.batches.jobs import Ending, Lease
from gateway.batches.outputs import output_of
from gateway.call import Call
from gateway.errors import Reason, Refusal, bad_input
from gateway.replicas import Replica
from gateway.telemetry import Telemetry
from gateway.wire.openai_errors import encode_openai_refusal

_log = logging.getLogger(__name__)

_NO_FAULT = frozenset((Reason.METERING, Reason.ABORTED))
_TOO_MUCH_NOW = 429
"""Refusals after which an item waits, for room, money or a disk, without anything counting against it."""

_MAX_WAIT_S = 300.0


class ItemPipeline(Protocol):
    """The one request path, for callers that were checked when they submitted."""

    async def serve(self, call: Call) -> None:
        """Raises Refusal."""


class GivenCallers:
    """Authenticates items: their batch's token was checked at its submission. Never meets a client."""

    async def authenticate(self, authorization: str | None, account_id: str) -> Principal:
        """The principal whose token id :func:`headers_of` wrote down."""
        return Principal(account_id, authorization or "", frozenset((RUN_PERMISSION,)))


class DeferredJournal:
    """Stands where usage records become durable, for items: theirs do so with their results, in one
    transaction, and nobody sees the result before.
    """

    is_full = False
    is_failing = False

    async def commit(self, record: msgspec.Struct) -> None:
        """The record travels on with its call."""


class Postponement(msgspec.Struct, frozen=True):
    """The item did not end and is to be tried again after ``delay_s``. ``is_busy``: for want of room."""

    delay_s: float
    has_failed: bool = False
    is_busy: bool = False


@dataclass(eq=False)
class RunningItem:
    """One leased item on its way. ``replica`` is where it should run, ``affinity_key`` how it gets there."""

    lease: Lease
    replica: Replica
    affinity_key: str
    is_lost: bool = False
    exchange: MemoryExchange = field(init=False)

    def __post_init__(self) -> None:
        headers = {"authorization": self.lease.token_id, "x-session-affinity": self.affinity_key}
        self.exchange = MemoryExchange(self.lease.body, headers)


class ItemRunner:
    """See the module. ``forms`` are by endpoint; ``clock`` is the event loop's."""

    def __init__(
        self,
        pipeline: ItemPipeline,
        forms: Mapping[str, ItemForm],
        telemetry: Telemetry,
        config: BatchesConfig,
        clock: Callable[[], float],
    ) -> None:
        self._pipeline = pipeline
        self._forms = forms
        self._telemetry = telemetry
        self._config = config
        self._clock = clock

    async def run(self, item: RunningItem) -> Ending | Postponement:
        """Run the item to its end, or to where it has to wait."""
        lease = item.lease
        form = self._forms.get(lease.endpoint)
        if form is None:
            return _failure(lease, bad_input("/endpoint", f"{lease.endpoint} is not served any more"), b"")
        path_model = lease.model if lease.form == "native" else None
        call = Call(
            item.exchange, form, lease.account_id, path_model, self._clock(), request_id=lease.request_id
        )
        self._telemetry.started(call)
        try:
            await self._pipeline.serve(call)
            return self._outcome(item, call)
        except Refusal as refusal:
            self._telemetry.refused(refusal.reason)
            call.refused_for = refusal.reason.word
            call.http_status = refusal.reason.status
            return self._judge(lease, call, refusal)
        except Exception:  # noqa: BLE001 - the top guard of items, which have no client to tell
            _log.exception("request %s failed", call.request_id)
            return self._judge(lease, call, Refusal(Reason.INTERNAL, "Internal error"))
        finally:
            if not item.exchange.is_started:
                call.record = None  # nothing of an attempt without an answer is kept
            self._telemetry.ended(call)

    def _outcome(self, item: RunningItem, call: Call) -> Ending | Postponement:
        exchange, lease = item.exchange, item.lease
        if exchange.status == 200 and call.record is not None:
            output = output_of(lease, 200, exchange.answer, message="")
            return Ending(lease=lease, is_success=True, output=output, record=call.record)
        if exchange.is_disconnected:
            return Postponement(0.0)
        return self._judge(lease, call, Refusal(Reason.INTERNAL, "the answer was not complete"))

    def _judge(self, lease: Lease, call: Call, refusal: Refusal) -> Ending | Postponement:
        """Whether a refused item has failed for good, or waits."""
        reason = refusal.reason
        is_no_fault = reason.status == _TOO_MUCH_NOW or reason in _NO_FAULT
        if is_no_fault or (reason is Reason.UNAVAILABLE and not call.num_attempts):
            delay_s = min(max(refusal.retry_after_s or 0.0, self._config.retry_initial_s), _MAX_WAIT_S)
            return Postponement(delay_s, is_busy=reason is Reason.CAPACITY)
        is_final = reason.status < 500 and reason is not Reason.TIMEOUT
        if is_final or lease.num_failures + 1 >= self._config.max_failures:
            return _failure(lease, refusal, call.surface.refusal(refusal, call.request_id))
        delay_s = min(self._config.retry_initial_s * 2**lease.num_failures, self._config.retry_max_s)
        return Postponement(delay_s, has_failed=True)


def exhausted(lease: Lease) -> Ending:
    """The end of an item whose lease ran out too often: whoever runs it dies of it."""
    message = f"Max retries exhausted: {lease.num_failures} attempts did not end."
    refusal = Refusal(Reason.UNAVAILABLE, message)
    return _failure(lease, refusal, b"")


def _failure(lease: Lease, refusal: Refusal, body: bytes) -> Ending:
    message = f"{refusal.reason.code}: {refusal.message}"
    content = body or encode_openai_refusal(refusal, lease.request_id)
    output = output_of(lease, refusal.reason.status, content, message=message)
    return Ending(lease=lease, is_success=False, output=output)
