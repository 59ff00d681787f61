"""Finds a replica for a request and brings its answer: affinity first, then the next in rank.

A replica that fails, or says that it is full, before the client got a byte is replaced by the next one
without the client noticing. After the first byte there is no second try: two halves of different answers are
not an answer.
"""

from __future__ import annotations

import logging
import re
from collections.abc import Callable, Sequence

import msgspec

from backend.wire import (
    PREFILL_HEADER,
    BadReplicaMessageError,
    ErrorBody,
    ErrorDetail,
    TokenUsage,
    decode_usage,
)
from gateway.call import Answer, Call, Interruption
from gateway.client import (
    ReplicaClient,
    ReplicaError,
    ReplicaLostError,
    ReplicaResponse,
    ReplicaTimeoutError,
    ReplicaUnreachableError,
)
from gateway.errors import Refusal, no_capacity, timed_out, unavailable
from gateway.predictions import CachePredictions
from gateway.replicas import Replica, ReplicaTable
from gateway.responses import stream_headers
from gateway.splitting import Splitter
from gateway.sse import BrokenStreamError, StreamRelay
from gateway.wire.openai import usage_of
from gateway.wire.replica import decode_refusal

_log = logging.getLogger(__name__)

_MAX_ERROR_BYTES = 64 * 1024
_FINISH_REASON = re.compile(rb'"finish_reason": ?"(\w+)"')
_STATUSES_OF_FAILURE = frozenset((401, 403, 404, 405, 409))
"""Refusals that say something about us or the replica, nothing about the request."""

_ENGINE_ERROR = "engine_error"
"""What a replica says when it failed at one request and goes on with all others."""

_ENGINE_DIED = "engine_died"
"""A replica's last words: as lost as one that could not say them any more."""

_BUSY_CODES = frozenset(("queue_full", "queue_timeout", "busy", "draining"))


class ReplicaBusyError(ReplicaError):
    """The replica refused because it is full or draining; it is healthy."""


class ReplicaFailedError(ReplicaError):
    """The replica said that it failed; ``code`` is its word for it."""

    def __init__(self, replica_id: str, message: str, code: str) -> None:
        super().__init__(replica_id, message)
        self.code = code


class Dispatcher:
    """See the module.

    ``headers`` go with every request to a replica. ``whole_answer_timeout_s`` bounds the wait for an answer
    in one piece, whose first byte comes when its last token has been generated.
    """

    def __init__(
        self,
        table: ReplicaTable,
        client: ReplicaClient,
        splitter: Splitter,
        predictions: CachePredictions,
        headers: Sequence[tuple[str, str]],
        *,
        max_attempts: int,
        whole_answer_timeout_s: float,
        clock: Callable[[], float],
    ) -> None:
        self._table = table
        self._client = client
        self._splitter = splitter
        self._predictions = predictions
        self._headers = tuple(headers)
        self._max_attempts = max_attempts
        self._whole_answer_timeout_s = whole_answer_timeout_s
        self._clock = clock

    async def answer(
        self, call: Call, model: str, body: bytes, headers: Sequence[tuple[str, str]], rejects_if_busy: bool
    ) -> Answer | Interruption:
        """Bring the answer of the first replica that gives one.

        The chunks of a stream have been forwarded when this returns, its end has not.

        Raises:
            Refusal: the request is wrong, or no replica could answer it; the client got no byte.
        """
        serving = self._table.serving(model)
        ranking = self._splitter.rank(call, serving)
        busy: set[Replica] = set()
        failed: set[Replica] = set()
        excluded: set[Replica] = set()
        for _ in range(self._max_attempts):
            is_last_resort = rejects_if_busy or bool(busy)
            replica = self._table.take_at_once(ranking, excluded, rejects_if_busy=is_last_resort)
            if replica is None:
                replica = await self._wait_for(ranking, busy, excluded, is_last_resort)
            try:
                return await self._attempt_split(call, replica, serving, body, headers)
            except ReplicaBusyError:
                busy.add(replica)
            except ReplicaTimeoutError as error:
                self._table.report_failure(replica)
                raise timed_out() from error
            except ReplicaError as error:
                _log.warning("request %s: %s", call.request_id, error)
                if not _is_of_one_request(error):
                    is_certain = not isinstance(error, ReplicaUnreachableError)
                    self._table.report_failure(replica, is_certain=is_certain)
                failed.add(replica)
            finally:
                self._table.put_back(replica)
            # When every replica failed, any of them may be tried again as soon as it is ready.
            excluded = busy | failed if len(busy | failed) < len(ranking) else busy
        raise no_capacity() if busy else unavailable()

    async def _wait_for(
        self, ranking: Sequence[Replica], busy: set[Replica], excluded: set[Replica], is_last_resort: bool
    ) -> Replica:
        """A place on a replica that has none at once. Raises Refusal."""
        try:
            return await self._table.take(ranking, excluded, rejects_if_busy=is_last_resort)
        except Refusal:
            if busy:
                raise no_capacity() from None
            raise

    async def _attempt_split(
        self,
        call: Call,
        replica: Replica,
        serving: Sequence[Replica],
        body: bytes,
        headers: Sequence[tuple[str, str]],
    ) -> Answer | Interruption:
        """Let ``replica`` answer, and perhaps another compute the prompt for it."""
        call.prefill_id = ""
        prefill = call.prefill = self._splitter.choose_prefill(call, replica, serving)
        if prefill is None:
            return await self._attempt(call, replica, body, headers)
        prefill.num_prefills += 1
        call.prefill_id = prefill.id
        try:
            place = (PREFILL_HEADER, prefill.transfer)
            return await self._attempt(call, replica, body, (*headers, place))
        finally:
            self._end_prefill(call)

    @staticmethod
    def _end_prefill(call: Call) -> None:
        """The prompt is computed, or not wanted any more."""
        if call.prefill is not None:
            call.prefill.num_prefills -= 1
            call.prefill = None

    async def _attempt(
        self, call: Call, replica: Replica, body: bytes, headers: Sequence[tuple[str, str]]
    ) -> Answer | Interruption:
        call.replica = replica
        call.num_attempts += 1
        call.predicted_cached_tokens = self._predictions.predict(
            call.account_id, call.affinity_key, replica.id
        )
        response = await self._client.open(
            replica.address,
            call.request.replica_path,
            (*self._headers, *headers) if headers else self._headers,
            body,
            first_byte_timeout_s=None if call.request.is_stream else self._whole_answer_timeout_s,
        )
        if response.status != 200:
            raise await _refused(replica, response)
        if response.headers.get("content-type", "").startswith("text/event-stream"):
            return await self._relay(call, replica, response)
        return await self._read(call, replica, response)

    async def _read(self, call: Call, replica: Replica, response: ReplicaResponse) -> Answer:
        completion = await response.read()
        try:
            usage = _decode_usage(usage_of(completion))
        except (msgspec.DecodeError, BadReplicaMessageError) as error:
            raise ReplicaLostError(replica.id, f"malformed answer: {error}") from error
        if call.span is not None:
            _note_finish_reasons(call, completion)
        return Answer(usage=usage, completion=completion)

    async def _relay(self, call: Call, replica: Replica, response: ReplicaResponse) -> Answer | Interruption:
        """Forward a stream's chunks. Raises ReplicaError only as long as the client got nothing."""
        exchange = call.exchange
        form = call.request.answer_form

        def write(data: bytes) -> None:
            if not exchange.is_started:
                start_stream(call)
                self._end_prefill(call)
            if call.span is not None:
                _note_finish_reasons(call, data)
            elif form is None:
                relay.write = exchange.write  # nothing is left to look at
            exchange.write(data if form is None else form.forward(data))

        relay = call.relay = StreamRelay(write, clock=self._clock)
        exchange.on_writable(
            lambda is_writable: response.resume_reading() if is_writable else response.pause_reading()
        )
        try:
            await response.relay(relay.feed)
            return _finished(replica, relay)
        except (ReplicaError, BrokenStreamError, BadReplicaMessageError) as error:
            failure = error if isinstance(error, ReplicaError) else ReplicaLostError(replica.id, str(error))
            if not exchange.is_started:
                raise failure from error
            _log.warning("request %s: %s", call.request_id, failure)
            if not _is_of_one_request(failure):
                is_certain = not isinstance(failure, ReplicaTimeoutError)
                self._table.report_failure(replica, is_certain=is_certain)
            return _interruption(failure)
        finally:
            call.first_byte_at = relay.first_frame_at
            exchange.on_writable(None)


def _is_of_one_request(error: ReplicaError) -> bool:
    """Whether the replica is none the worse for it: a request that makes engines fail must not take replicas
    from everybody else.
    """
    return isinstance(error, ReplicaFailedError) and error.code == _ENGINE_ERROR


def _note_finish_reasons(call: Call, data: bytes) -> None:
    """For spans only; text of an answer cannot look like it, because its quotes are escaped."""
    call.finish_reasons.extend(reason.decode() for reason in _FINISH_REASON.findall(data))


def start_stream(call: Call) -> None:
    """Send the head of a successful stream."""
    call.http_status = 200
    call.exchange.start_stream(200, stream_headers(call))


def _finished(replica: Replica, relay: StreamRelay) -> Answer:
    """How a stream that reached its end ended. Raises ReplicaError when that was no proper end."""
    if relay.error is not None:
        raise _failure_in_stream(replica, relay.error)
    if not relay.is_done or relay.usage is None or relay.final_frame is None:
        raise ReplicaLostError(replica.id, "the stream ended without usage and [DONE]")
    return Answer(usage=decode_usage(relay.usage), final_chunk=relay.final_frame)


def _failure_in_stream(replica: Replica, raw: bytes) -> ReplicaError:
    try:
        detail = msgspec.json.decode(raw, type=ErrorDetail)
    except msgspec.DecodeError:
        return ReplicaLostError(replica.id, "the stream ended in an error")
    if detail.code in _BUSY_CODES:
        return ReplicaBusyError(replica.id, detail.message)
    if detail.code == _ENGINE_DIED:
        return ReplicaLostError(replica.id, detail.message)
    code = detail.code or "server_error"
    return ReplicaFailedError(replica.id, f"failed: {code}", code)


def _interruption(error: ReplicaError) -> Interruption:
    """An answer that the client has in part and that cannot be completed."""
    if isinstance(error, ReplicaTimeoutError):
        message = "The replica stopped sending; the answer is incomplete."
        return Interruption(status="timeout", code="timeout", message=message)
    if isinstance(error, ReplicaFailedError):
        message = "The replica failed; the answer is incomplete."
        return Interruption(status="error", code=error.code, message=message)
    message = "The replica was lost; the answer is incomplete."
    return Interruption(status="replica_lost", code="worker_lost", message=message)


async def _refused(replica: Replica, response: ReplicaResponse) -> Refusal | ReplicaError:
    """What an answer other than 200 means."""
    status = response.status
    body = await response.read(_MAX_ERROR_BYTES)
    if status in (429, 503):
        return ReplicaBusyError(replica.id, f"refused with {status}")
    if status in _STATUSES_OF_FAILURE or status >= 500 or status < 400:
        code = _code_of(body)
        return ReplicaFailedError(replica.id, f"answered {status} {code}", code or "server_error")
    return decode_refusal(status, body)


def _code_of(body: bytes) -> str:
    """The stable word of a refusal, for logs; its message might quote the request."""
    try:
        return msgspec.json.decode(body, type=ErrorBody).error.code or ""
    except msgspec.DecodeError:
        return ""


def _decode_usage(raw: msgspec.Raw | None) -> TokenUsage:
    if raw is None:
        raise BadReplicaMessageError("usage: missing")
    return decode_usage(raw)
