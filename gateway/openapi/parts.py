"""What a part of the document is made of."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from types import MappingProxyType
from typing import Any, Literal

import msgspec

Method = Literal["get", "post", "patch", "delete"]
Schema = dict[str, Any]

JSON = "application/json"
EVENT_STREAM = "text/event-stream"

ACCOUNT = "/client/v4/accounts/{account_id}"

MEANINGS: Mapping[int, str] = MappingProxyType(
    {
        200: "The answer.",
        302: "Elsewhere.",
        303: "Elsewhere.",
        400: "The request is wrong; the message names the field.",
        401: "No, unknown or revoked API token, or one of another account.",
        403: "The API token may not do this.",
        404: "There is no such thing.",
        405: "Wrong method.",
        408: "The request took too long, or was aborted.",
        409: "Not in this state.",
        413: "The request is too large.",
        415: "The body is not in a form that can be read.",
        429: "Too many requests, no capacity, or the allowance is used up; see retry-after.",
        503: "No replica, no database, or no room at the moment.",
    }
)

READING_REFUSALS = (400, 401, 403, 404, 503)
"""What a route that only reads can refuse with."""

BODY_REFUSALS = (400, 401, 403, 404, 408, 413, 415, 429, 503)
"""What a route with a body can refuse with."""


class Content(msgspec.Struct, frozen=True):
    """A body of one or several media types."""

    types: Sequence[str]
    schema: Schema


class Operation(msgspec.Struct, frozen=True, kw_only=True):
    """One method of one path. ``body`` is a struct or a schema; ``query`` the names of its parameters."""

    path: str
    method: Method
    summary: str
    tag: str
    answer: Content
    status: int = 200
    body: type[msgspec.Struct] | Content | None = None
    query: Sequence[str] = ()
    headers: Sequence[str] = ()
    refusals: Sequence[int] = READING_REFUSALS
    refusal_schema: str = "Refusal"
    is_open: bool = False


def documented(body: type[msgspec.Struct], name: str) -> type[msgspec.Struct]:
    """``body`` under the name that the document gives it, without members that are passed on undecoded."""
    fields = [field for field in msgspec.structs.fields(body) if field.type is not msgspec.Raw]
    described = [(field.name, field.type | None, None) for field in fields]
    return msgspec.defstruct(name, described, namespace={"__doc__": body.__doc__}, kw_only=True)


def answers(*required: str, kind: str = "object") -> Content:
    """JSON that has at least these members."""
    schema: Schema = {"type": kind}
    if required:
        schema["required"] = list(required)
    return Content((JSON,), schema)


ENVELOPE = answers("result", "success", "errors", "messages")
"""Workers AI's success envelope."""
