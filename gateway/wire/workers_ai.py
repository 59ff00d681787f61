"""The forms of Workers AI: envelopes, the native stream tail, run options and resource paths."""

from __future__ import annotations

from collections.abc import Mapping
from functools import lru_cache
from types import MappingProxyType
from urllib.parse import unquote

import msgspec

from gateway.errors import Reason, Refusal

GATEWAY_RUN_PATH = "/ai-gateway/run"

_ACCOUNTS = "/client/v4/accounts/"
_RUN = "ai/run"
_V1_SURFACES = MappingProxyType(
    {
        "chat/completions": "v1",
        "completions": "completions",
        "embeddings": "embeddings",
        "responses": "responses",
    }
)
"""Paths of OpenAI's API -> surfaces; below ``/v1`` alone they are called ``plain`` ones."""

ACCOUNT_PATHS = tuple(
    f"{_ACCOUNTS}{{account_id}}/ai/{path}"
    for path in ("run", "run/{model}", *(f"v1/{path}" for path in _V1_SURFACES))
)
"""The paths of inference below an account, as documentation writes them."""

PLAIN_PATHS = tuple(f"/v1/{path}" for path in _V1_SURFACES)
_RESOURCES = MappingProxyType({f"ai/v1/{path}": surface for path, surface in _V1_SURFACES.items()})
_MAX_SESSION_CHARS = 256
_MAX_RECENT_PATHS = 256


class RunTarget(msgspec.Struct, frozen=True):
    """What the path of an inference request names. ``model`` is None when the body or a header has to say it,
    and ``account_id`` is "" when the API token or a header has to.
    """

    account_id: str
    surface: str
    model: str | None


_SHORT_TARGETS = MappingProxyType(
    {
        "/run": RunTarget("", "binding", None),
        GATEWAY_RUN_PATH: RunTarget("", "binding", None),
        **{f"/v1/{path}": RunTarget("", f"plain {surface}", None) for path, surface in _V1_SURFACES.items()},
    }
)
"""Paths that name no account."""


class RunOptions(msgspec.Struct, frozen=True, rename="camel"):
    """``options`` of a request body; unknown ones are ignored."""

    reject_if_busy: bool | None = None
    queue_request: bool | None = None
    session_affinity: str | None = None
    headers: dict[str, str] | None = None


class _ErrorItem(msgspec.Struct, frozen=True):
    message: str
    code: int


class _EdgeErrorItem(msgspec.Struct, frozen=True):
    code: int
    message: str


class _InferenceError(msgspec.Struct, frozen=True):
    """Key order as the inference layer has it."""

    errors: list[_ErrorItem]
    success: bool = False
    result: dict[str, str] = {}
    messages: list[str] = []


class _EdgeError(msgspec.Struct, frozen=True):
    """Key order as the API edge has it."""

    result: None
    success: bool
    errors: list[_EdgeErrorItem]
    messages: list[str] = []


@lru_cache(_MAX_RECENT_PATHS)  # a client asks for the same path again and again
def parse_target(path: str) -> RunTarget | None:
    """What a raw, still percent-encoded path names; None when it is no inference route."""
    if not path.startswith(_ACCOUNTS):
        return _SHORT_TARGETS.get(path)
    account_id, _, resource = path[len(_ACCOUNTS) :].partition("/")
    if not account_id:
        return None
    surface = _RESOURCES.get(resource)
    if surface is not None:
        return RunTarget(account_id, surface, None)
    if not resource.startswith(_RUN):
        return None
    model = resource[len(_RUN) :]
    if model in ("", "/"):
        return RunTarget(account_id, "run", None)
    if model[0] != "/":
        return None
    return RunTarget(account_id, "run", unquote(model[1:]))


def affinity_of(headers: Mapping[str, str], options: RunOptions | None) -> str:
    """The client's affinity value, or "": the header first, then the places where bindings leave it."""
    value = headers.get("x-session-affinity")
    if value:
        return value
    if options is None:
        return ""
    if options.session_affinity:
        return options.session_affinity
    for name, option in (options.headers or {}).items():
        if name.lower() == "x-session-affinity":
            return option
    return ""


def session_label(affinity: str) -> str:
    """The affinity value as usage records keep it: bounded, and without characters that databases refuse."""
    label = affinity[:_MAX_SESSION_CHARS]
    return label if label.isprintable() else "".join(filter(str.isprintable, label))


def encode_refusal(refusal: Refusal, request_id: str) -> bytes:
    """The error body that clients of Workers AI expect, in the form of the layer that refused."""
    reason = refusal.reason
    if reason.layer == "edge":
        items = [_EdgeErrorItem(reason.code, refusal.message)]
        if reason is Reason.NO_ROUTE:
            items.append(_EdgeErrorItem(7000, "No route for that URI"))
        return msgspec.json.encode(_EdgeError(None, False, items))
    message = f"AiError: {refusal.message} ({request_id})"
    return msgspec.json.encode(_InferenceError([_ErrorItem(message, reason.code)]))


def envelop(result: bytes) -> bytes:
    """The success envelope around an encoded result."""
    return b'{"result":' + result + b',"success":true,"errors":[],"messages":[]}'


def native_tail(usage: bytes) -> bytes:
    """The frame with which native streams end: an empty response and the one authoritative usage."""
    return b'data: {"response":"","usage":' + usage + b"}\n\n"
