"""Batches on the native surfaces, REST and binding: ``queueRequest`` submits, ``{"request_id"}`` polls."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from urllib.parse import parse_qs

import msgspec

from billing.accounts import Principal
from billing.store import StoreError
from gateway.batches.archive import BatchArchive
from gateway.batches.config import BatchesConfig
from gateway.batches.jobs import NATIVE_ENDPOINT, Batch, ItemState, NewBatch
from gateway.batches.outputs import encode_native_result, output_of_ended
from gateway.batches.queue import BatchQueue, QueueFullError
from gateway.batches.submission import NativeBody, decode_native, native_items
from gateway.catalog import Catalog
from gateway.errors import Reason, Refusal, bad_input, too_large

_TRUE = frozenset(("true", "1"))
_ENDED_STATES: tuple[ItemState, ...] = ("succeeded", "failed", "expired", "cancelled")
_FULL_RETRY_S = 60


def wants_queue(query: str) -> bool:
    """Whether a query string has ``queueRequest=true``."""
    return "queueRequest" in query and parse_qs(query).get("queueRequest", [""])[-1].lower() in _TRUE


def may_be_batch(body: bytes) -> bool:
    """A cheap look at a body that is worth a closer one."""
    return body.find(b'"request_id"') >= 0 or body.find(b'"requests"') >= 0


class NativeBatches:
    """Answers what belongs to batches among native requests. Belongs to one event loop.

    ``admit`` counts one submission against the account's rate and raises Refusal; ``wake`` tells the worker.
    """

    def __init__(
        self,
        queue: BatchQueue,
        archive: BatchArchive,
        catalog: Catalog,
        config: BatchesConfig,
        admit: Callable[[Principal, str], None],
        wake: Callable[[], None],
    ) -> None:
        self._queue = queue
        self._archive = archive
        self._catalog = catalog
        self._config = config
        self._admit = admit
        self._wake = wake

    def claims(self, body: bytes, *, is_queued: bool) -> NativeBody | None:
        """What the body of a request says of batches; None when it is an ordinary request.

        Raises:
            Refusal: 400, a submission without ``requests``, or ``requests`` that should not be queued.
        """
        if not (is_queued or may_be_batch(body)):
            return None
        native = decode_native(body)
        if native is not None and native.is_poll:
            return native
        if is_queued:
            return native or NativeBody()
        if native is not None and native.is_submission:
            raise bad_input("/requests", "is for asynchronous batches: send it with queueRequest=true")
        return None

    async def answer(
        self, native: NativeBody, body: bytes, principal: Principal, path_model: str | None, request_id: str
    ) -> bytes:
        """The bare result of a submission or a poll. A batch that is submitted gets the id ``request_id``.

        Raises:
            Refusal: it cannot be answered.
        """
        try:
            if native.is_poll:
                return await self._poll(native.request_id, principal)
            return await self._submit(native, body, principal, path_model, request_id)
        except StoreError as error:
            raise batches_unavailable() from error

    async def _submit(
        self, native: NativeBody, body: bytes, principal: Principal, path_model: str | None, batch_id: str
    ) -> bytes:
        if not self._config.is_enabled:
            raise bad_input("queueRequest", "asynchronous batches are switched off here")
        if len(body) > self._config.max_payload_bytes:
            raise too_large(self._config.max_payload_bytes)
        model = path_model or native.model
        if not isinstance(model, str) or not model:
            raise bad_input("/model", "is required")
        self._admit(principal, self._catalog.find(model).id)
        new = NewBatch(
            id=batch_id,
            account_id=principal.account_id,
            token_id=principal.token_id,
            form="native",
            endpoint=NATIVE_ENDPOINT,
            model=model,
            items=native_items(native, self._config.max_items),
        )
        try:
            await asyncio.to_thread(self._queue.submit, new)
        except QueueFullError as error:
            raise queue_full(error) from error
        self._wake()
        return msgspec.json.encode({"status": "queued", "request_id": batch_id, "model": model})

    async def _poll(self, raw_id: msgspec.Raw, principal: Principal) -> bytes:
        try:
            batch_id = msgspec.json.decode(raw_id, type=str)
        except msgspec.DecodeError:
            raise bad_input("/request_id", "must be a string") from None
        batch = await asyncio.to_thread(self._archive.find, principal.account_id, batch_id)
        if batch is None or batch.form != "native":
            raise bad_input("/request_id", f"there is no batch {batch_id[:100]}")
        if batch.is_open:
            return msgspec.json.encode({"status": "queued" if batch.status == "queued" else "running"})
        return await asyncio.to_thread(self._result_of, batch)

    def _result_of(self, batch: Batch) -> bytes:
        items = self._archive.all_ended_items(batch.id, _ENDED_STATES)
        outputs = [output_of_ended(batch, item) for item in items]
        return encode_native_result(outputs, self._archive.usage(batch.id))


def batches_unavailable() -> Refusal:
    """The database does not answer."""
    message = "Batches cannot be stored or read at the moment, please try again."
    return Refusal(Reason.UNAVAILABLE, message, retry_after_s=1)


def queue_full(error: QueueFullError) -> Refusal:
    """The account has as much in the queue as it may; no capacity of replicas is missing."""
    return Refusal(Reason.RATE, f"rate limiting: {error}", retry_after_s=_FULL_RETRY_S)
