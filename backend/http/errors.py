"""Every refusal of a replica: status, stable code, message, the one wrong field."""

from __future__ import annotations

from typing import Final

import msgspec

from backend.engine.messages import RefusalCode
from backend.wire import ErrorBody, ErrorDetail

_encode = msgspec.json.Encoder().encode


class ReplicaError(Exception):
    """A refusal on its way to becoming a response, or the error frame of a stream that had begun."""

    def __init__(self, status: int, detail: ErrorDetail) -> None:
        super().__init__(detail.message)
        self.status = status
        self.detail = detail

    def encode(self) -> bytes:
        """The error as a response body."""
        return _encode(ErrorBody(self.detail))


def bad_request(param: str | None, message: str, code: str = "invalid_value") -> ReplicaError:
    return ReplicaError(400, ErrorDetail(message=message, param=param, code=code))


def unsupported(param: str, message: str) -> ReplicaError:
    return bad_request(param, message, "unsupported_value")


def context_length_exceeded(max_model_len: int, prompt: int, completion: int) -> ReplicaError:
    """The sentence is what agents search for before they compact a conversation: keep it as it is."""
    message = (
        f"Requested token count exceeds the model's maximum context length of {max_model_len} tokens. "
        f"You requested a total of {prompt + completion} tokens: {prompt} tokens from the input messages "
        f"and {completion} tokens for the completion. Please reduce the number of tokens in the input "
        "messages or the completion to fit within the limit."
    )
    return bad_request("messages", message, "context_length_exceeded")


def unauthorized() -> ReplicaError:
    message = "the pool token is missing or wrong"
    return ReplicaError(
        401, ErrorDetail(message=message, type="authentication_error", code="invalid_api_key")
    )


def not_found(what: str) -> ReplicaError:
    return ReplicaError(404, ErrorDetail(message=f"{what} does not exist here", code="not_found"))


def too_large(max_body_bytes: int) -> ReplicaError:
    message = f"the body is larger than {max_body_bytes} bytes"
    return ReplicaError(413, ErrorDetail(message=message, code="request_too_large"))


def duplicate_request(request_id: str) -> ReplicaError:
    message = f"request_id: {request_id} is in progress already"
    return ReplicaError(409, ErrorDetail(message=message, param="request_id", code="duplicate_request"))


def not_serving(state: str) -> ReplicaError:
    """The replica takes no requests: it is ``starting`` or ``draining``."""
    message = f"the replica is {state}"
    return ReplicaError(503, ErrorDetail(message=message, type="server_error", code=state))


def engine_died() -> ReplicaError:
    message = "the engine of the replica has ended; the answer is incomplete"
    return ReplicaError(500, ErrorDetail(message=message, type="server_error", code="engine_died"))


def engine_failed(message: str) -> ReplicaError:
    return ReplicaError(500, ErrorDetail(message=message, type="server_error", code="engine_error"))


def internal_error() -> ReplicaError:
    message = "the replica failed; its log says why"
    return ReplicaError(500, ErrorDetail(message=message, type="server_error", code="internal_error"))


_REFUSAL_STATUS: Final[dict[RefusalCode, int]] = {
    "context_length_exceeded": 400,
    "invalid_request": 400,
    "queue_full": 429,
    "queue_timeout": 429,
    "busy": 429,
}


def refused(code: RefusalCode, message: str) -> ReplicaError:
    """What the engine said no to; nothing was computed."""
    status = _REFUSAL_STATUS[code]
    kind = "rate_limit_error" if status == 429 else "invalid_request_error"
    return ReplicaError(status, ErrorDetail(message=message, type=kind, code=code))
