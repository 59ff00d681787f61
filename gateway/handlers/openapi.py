"""``GET /openapi.json``: the description of the gateway's own surface. Open to everyone."""

from __future__ import annotations

import msgspec
from aiohttp import web

from gateway.openapi.whole import whole_document


class OpenAPIRoute:
    """Made when it is first asked for, and kept."""

    def __init__(self) -> None:
        self._body = b""

    def add_to(self, router: web.UrlDispatcher) -> None:
        """Add the route."""
        router.add_get("/openapi.json", self.document)

    async def document(self, request: web.Request) -> web.Response:
        """The document."""
        self._body = self._body or msgspec.json.encode(whole_document())
        return web.Response(body=self._body, content_type="application/json")
