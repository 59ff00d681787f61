"""Refusals in OpenAI's form, ``{"error": {"message", "type", "param", "code"}}``."""

from __future__ import annotations

import re
from collections.abc import Mapping
from types import MappingProxyType

import msgspec

from gateway.errors import Reason, Refusal
from gateway.wire.workers_ai import encode_refusal

_CODES: Mapping[Reason, str] = MappingProxyType(
    {
        Reason.AUTHENTICATION: "invalid_api_key",
        Reason.NO_SUCH_MODEL: "model_not_found",
        Reason.CONTEXT_OVERFLOW: "context_length_exceeded",
        Reason.RATE: "rate_limit_exceeded",
        Reason.DAILY_NEURONS: "insufficient_quota",
        Reason.BUDGET: "insufficient_quota",
        Reason.CAPACITY: "capacity_exceeded",
    }
)
_TYPES: Mapping[int, str] = MappingProxyType(
    {401: "authentication_error", 403: "permission_error", 429: "rate_limit_error"}
)
_FIELD = re.compile(r"^Bad input: '/([^']*)'")


class _Detail(msgspec.Struct, frozen=True):
    message: str
    type: str
    param: str | None
    code: str


class _Error(msgspec.Struct, frozen=True):
    error: _Detail


def encode_openai_refusal(refusal: Refusal, request_id: str) -> bytes:
    """The error body that clients of OpenAI expect; ``param`` is the one wrong field, with dots."""
    field = _FIELD.match(refusal.message)
    reason = refusal.reason
    default = "server_error" if reason.status >= 500 else "invalid_request_error"
    detail = _Detail(
        refusal.message,
        _TYPES.get(reason.status, default),
        field[1].replace("/", ".") if field else None,
        _CODES.get(reason, reason.word),
    )
    return msgspec.json.encode(_Error(detail))


def encode_responses_refusal(refusal: Refusal, request_id: str) -> bytes:
    """Refusals of Workers AI's ``/ai/v1/responses``: OpenAI's form, but for those of the edge."""
    if refusal.reason.layer == "edge":
        return encode_refusal(refusal, request_id)
    return encode_openai_refusal(refusal, request_id)
