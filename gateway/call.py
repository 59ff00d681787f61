"""One inference request on its way through the edge: what each step learned, for the steps after it."""

from __future__ import annotations

import time
from dataclasses import dataclass, field
from typing import Any, Protocol

import msgspec

from backend.wire import TokenUsage
from billing.accounts import Principal
from billing.rates import Charge
from billing.usage import Status, Surface, UsageRecord, new_request_id
from gateway.config import ServedModel
from gateway.edge.exchange import Exchange, Headers
from gateway.errors import Refusal
from gateway.images.intake import ImagePlan
from gateway.limits import Reservation
from gateway.replicas import Replica
from gateway.sse import StreamRelay
from gateway.wire.embeddings import EmbeddingsRequest
from gateway.wire.openai import ChatRequest

InferenceRequest = ChatRequest | EmbeddingsRequest
"""A decoded request: what it asks for differs, what the pipeline decides upon does not."""


def ray_of(request_id: str) -> str:
    """The edge's own id of a request in the usual form: 16 hexadecimal digits and a place."""
    return f"{request_id[-16:].replace('-', '0')}-EMB"


class SurfaceForm(Protocol):
    """How one public surface reads requests and writes the ends of answers."""

    name: Surface

    def decode(self, body: bytes, path_model: str | None, query: str) -> InferenceRequest:
        """Raises Refusal naming the wrong field."""

    def completion(self, completion: bytes, usage: bytes) -> bytes:
        """The body of an answer in one piece."""

    def stream_end(self, final_chunk: bytes, usage: bytes, *, includes_usage: bool) -> bytes:
        """What follows the forwarded chunks when the answer is complete and recorded."""

    def refusal(self, refusal: Refusal, request_id: str) -> bytes:
        """The body of a refusal."""


class Answer(msgspec.Struct, frozen=True, kw_only=True):
    """A complete answer of a replica, whose end the client has not seen yet.

    ``completion`` is the whole of an answer without streaming; ``final_chunk`` the held-back usage chunk of a
    stream, the rest of which has been forwarded.
    """

    usage: TokenUsage
    completion: bytes = b""
    final_chunk: bytes = b""


class Interruption(msgspec.Struct, frozen=True, kw_only=True):
    """Why an answer has no end. ``code`` and ``message`` are for the client, if it is still there."""

    status: Status
    code: str = ""
    message: str = ""


@dataclass(slots=True, eq=False)
class Call:
    """State of one request. ``started_at`` is the loop's clock, ``started_at_us`` the wall's.

    ``principal``, ``request``, ``model`` and ``images`` are set in this order by admission, ``replica`` by
    the first attempt. Until ``principal`` is known, ``account_id`` is what the path names, "" when it names
    none.
    """

    exchange: Exchange
    surface: SurfaceForm
    account_id: str
    path_model: str | None
    started_at: float
    started_at_us: int = field(default_factory=lambda: time.time_ns() // 1000)
    request_id: str = ""
    principal: Principal = field(init=False)
    request: InferenceRequest = field(init=False)
    model: ServedModel = field(init=False)
    images: ImagePlan = field(init=False)
    reservation: Reservation = field(init=False)
    rate_headers: Headers = ()
    replica: Replica = field(init=False)
    prefill: Replica | None = None
    prefill_id: str = ""
    session: str = ""
    affinity_key: str = ""
    num_attempts: int = 0
    predicted_cached_tokens: int = 0
    relay: StreamRelay | None = None
    first_byte_at: float | None = None
    http_status: int = 0
    refused_for: str = ""
    finish_reasons: list[str] = field(default_factory=list)
    model_id: str = ""
    record: UsageRecord | None = None
    charge: Charge = field(init=False)
    span: Any = None

    def __post_init__(self) -> None:
        if not self.request_id:
            self.request_id = new_request_id(self.started_at_us)

    @property
    def ray(self) -> str:
        """The id by which the edge itself knows the request."""
        return ray_of(self.request_id)

    @property
    def num_frames(self) -> int:
        """Stream chunks that were forwarded to the client."""
        return 0 if self.relay is None else self.relay.num_frames
