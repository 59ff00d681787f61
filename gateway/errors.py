"""Every way in which the edge refuses a request: one table of statuses and codes, one exception.

``Reason`` names what happened; its status and code are what clients of Workers AI already handle. The *layer*
decides the form of the error body: ``edge`` refusals come before a request reached a model, ``inference``
refusals after (see :mod:`gateway.wire.workers_ai`). Messages are one human sentence each.
"""

from __future__ import annotations

from enum import Enum
from typing import Literal

Layer = Literal["edge", "inference"]


class Reason(Enum):
    """HTTP status, numeric code and layer of each kind of refusal."""

    AUTHENTICATION = (401, 10000, "edge")
    INVALID_TOKEN = (401, 1000, "edge")
    NO_USER = (403, 9109, "edge")
    NOT_FOUND = (404, 7404, "edge")
    NOT_HERE = (404, 7501, "edge")
    NO_ROUTE = (404, 7003, "edge")
    METHOD_NOT_ALLOWED = (405, 7001, "edge")
    MISSING_BODY = (400, 3003, "inference")
    BAD_INPUT = (400, 5006, "inference")
    NO_SUCH_MODEL = (400, 5007, "inference")
    CONTEXT_OVERFLOW = (400, 8007, "inference")
    NOT_PERMITTED = (403, 5018, "inference")
    TIMEOUT = (408, 3007, "inference")
    ABORTED = (408, 3008, "inference")
    TOO_LARGE = (413, 3006, "inference")
    BODY_ENCODING = (415, 5006, "inference")
    BUDGET = (429, 3036, "inference")
    RATE = (429, 3021, "inference")
    DAILY_NEURONS = (429, 4006, "inference")
    CAPACITY = (429, 3040, "inference")
    INTERNAL = (500, 7009, "inference")
    UNAVAILABLE = (503, 3050, "inference")
    METERING = (503, 7009, "inference")

    def __init__(self, status: int, code: int, layer: Layer) -> None:
        self.status = status
        self.code = code
        self.layer: Layer = layer

    @property
    def word(self) -> str:
        """A stable lower-case name for logs and metrics."""
        return self.name.lower()


class Refusal(Exception):  # noqa: N818 - it is an answer, not a fault
    """The request gets this answer and no other.

    Attributes:
        reason: status, code and layer.
        message: one sentence for the client; names the one wrong field where there is one.
        retry_after_s: whole seconds until a retry can succeed, at least 1; None when waiting does not help.
        headers: further response headers.
    """

    def __init__(
        self,
        reason: Reason,
        message: str,
        *,
        retry_after_s: int | None = None,
        headers: tuple[tuple[str, str], ...] = (),
    ) -> None:
        super().__init__(message)
        self.reason = reason
        self.message = message
        self.retry_after_s = retry_after_s
        self.headers = headers


def bad_input(pointer: str, problem: str) -> Refusal:
    """The field at the JSON pointer ``pointer`` (such as ``/messages/0/role``) is wrong."""
    return Refusal(Reason.BAD_INPUT, f"Bad input: '{pointer}': {problem}")


def unauthenticated() -> Refusal:
    """Unknown or revoked API token, none at all, or a valid one of another account: indistinguishable
    outside.
    """
    return Refusal(Reason.AUTHENTICATION, "Authentication error")


def no_such_model(model: str) -> Refusal:
    return Refusal(Reason.NO_SUCH_MODEL, f"No such model {model[:200]} or task")


def no_messages_api() -> Refusal:
    """Clients of Anthropic's API are told where their conversation can go."""
    return Refusal(
        Reason.NOT_HERE,
        "Anthropic's Messages API is not served here, for no model: use OpenAI's form at "
        "/v1/chat/completions or /v1/responses",
    )


def no_route(path: str) -> Refusal:
    return Refusal(
        Reason.NO_ROUTE, f"Could not route to {path[:500]}, perhaps your object identifier is invalid?"
    )


def method_not_allowed(method: str, allowed: str) -> Refusal:
    """``allowed`` is the value of ``Allow``."""
    message = f"{method[:20]} not supported for requested URI."
    return Refusal(Reason.METHOD_NOT_ALLOWED, message, headers=(("allow", allowed),))


def body_encoding(encoding: str) -> Refusal:
    """The body is compressed."""
    return Refusal(
        Reason.BODY_ENCODING,
        f"content-encoding {encoding[:50]!r} is not supported: send the body as plain JSON",
        headers=(("accept-encoding", "identity"),),
    )


def bodies_full() -> Refusal:
    """Too many bytes of request bodies are in memory already."""
    message = "Too much is being sent at once, please try again."
    return Refusal(Reason.CAPACITY, message, retry_after_s=1)


def too_large(max_bytes: int) -> Refusal:
    return Refusal(Reason.TOO_LARGE, f"Request is too large: the limit is {max_bytes} bytes")


def no_capacity() -> Refusal:
    """Every replica of the model is full."""
    return Refusal(Reason.CAPACITY, "Capacity temporarily exceeded, please try again.", retry_after_s=1)


def unavailable() -> Refusal:
    """No replica of the model could be reached."""
    message = "Max retries exhausted: no replica could serve the request."
    return Refusal(Reason.UNAVAILABLE, message, retry_after_s=1)


def accounts_unavailable() -> Refusal:
    """The database of accounts does not answer, so nobody can be told to be who they say."""
    message = "API tokens cannot be checked at the moment, please try again."
    return Refusal(Reason.UNAVAILABLE, message, retry_after_s=1)


def timed_out() -> Refusal:
    return Refusal(Reason.TIMEOUT, "Request timeout")


def aborted() -> Refusal:
    """The client left before any replica began to work; nobody reads this."""
    return Refusal(Reason.ABORTED, "Request was aborted")


def metering_unavailable() -> Refusal:
    """The usage record could not be made durable, so the answer must not count as given."""
    message = "The usage of this request could not be recorded; it is not charged."
    return Refusal(Reason.METERING, message, retry_after_s=1)
