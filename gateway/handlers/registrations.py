"""Where replicas say that they are there. Operators' networks only; see :mod:`gateway.registrations`."""

from __future__ import annotations

from aiohttp import web

from backend.wire import REGISTRATION_PATH, SIGNATURE_HEADER
from gateway.errors import too_large
from gateway.registrations import MAX_REGISTRATION_BYTES, Registrations


class RegistrationRoutes:
    """``POST /internal/replicas``."""

    def __init__(self, registrations: Registrations) -> None:
        self._registrations = registrations

    def add_to(self, router: web.UrlDispatcher) -> None:
        """Add the route."""
        router.add_post(REGISTRATION_PATH, self.register)

    async def register(self, request: web.Request) -> web.Response:
        """204 when the replica is, or is no longer, in the pool. Raises Refusal."""
        body = bytearray()
        async for data in request.content.iter_any():
            body += data
            if len(body) > MAX_REGISTRATION_BYTES:
                raise too_large(MAX_REGISTRATION_BYTES)
        self._registrations.hear(bytes(body), request.headers.get(SIGNATURE_HEADER, ""))
        return web.Response(status=204)
