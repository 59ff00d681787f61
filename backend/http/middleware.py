"""What goes around every handler: the pool token, and that any failure becomes the right response."""

from __future__ import annotations

import hmac
import logging
from typing import Final

from aiohttp import web
from aiohttp.typedefs import Handler, Middleware

from backend.http.errors import ReplicaError, internal_error, not_found, too_large, unauthorized
from backend.metrics import ReplicaMetrics

_OPEN_PATHS: Final = frozenset({"/health", "/metrics"})
_log = logging.getLogger("backend.http")


def guard(pool_token: str, max_body_bytes: int, metrics: ReplicaMetrics) -> Middleware:
    """The outermost middleware.

    Args:
        pool_token: what callers must present as bearer token; "" asks for none.
        max_body_bytes: named in the refusal of a larger body.
        metrics: counts refusals.
    """
    expected = f"Bearer {pool_token}".encode()

    def check_token(request: web.Request) -> None:
        if not pool_token or request.path in _OPEN_PATHS:
            return
        given = request.headers.get("Authorization", "").encode("utf-8", "surrogateescape")
        if not hmac.compare_digest(given, expected):
            raise unauthorized()

    @web.middleware
    async def middleware(request: web.Request, handler: Handler) -> web.StreamResponse:
        try:
            check_token(request)
            return await handler(request)
        except ReplicaError as error:
            refusal = error
        except web.HTTPRequestEntityTooLarge:
            refusal = too_large(max_body_bytes)
        except web.HTTPNotFound:
            refusal = not_found("this path")
        except web.HTTPMethodNotAllowed as error:
            refusal = not_found(f"{error.method} for this path")
            refusal.status = 405
        except Exception:  # noqa: BLE001 (one of the two top guards)
            _log.exception("a handler failed", extra={"fields": {"path": request.path}})
            refusal = internal_error()
        metrics.count_refusal(refusal.detail.code or "error")
        return _as_response(refusal)

    return middleware


def _as_response(error: ReplicaError) -> web.Response:
    response = web.Response(status=error.status, body=error.encode(), content_type="application/json")
    if error.status in (429, 503):
        response.headers["Retry-After"] = "1"
    return response
