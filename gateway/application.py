"""All routes of the edge as one aiohttp application; the hot ones usually go past it."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

from aiohttp import web

from gateway.config import GatewayConfig
from gateway.edge.admission import BodyBudget
from gateway.edge.aiohttp_exchange import expect_continue, serve_exchange
from gateway.handlers.inference import InferenceRoutes
from gateway.handlers.ops import OpsRoutes, envelop_errors
from gateway.wire.workers_ai import PLAIN_PATHS


class Routes(Protocol):
    """Handlers that know their own paths."""

    def add_to(self, router: web.UrlDispatcher) -> None:
        """Add the routes."""


def application(
    config: GatewayConfig,
    inference: InferenceRoutes,
    ops: OpsRoutes,
    bodies: BodyBudget,
    more: Sequence[Routes] = (),
) -> web.Application:
    """All routes on aiohttp; the hot ones usually go past it. ``ops`` comes last: it takes what is left."""

    async def infer(request: web.Request) -> web.StreamResponse:
        path, _, _ = request.raw_path.partition("?")
        handler = inference.match(path)
        if handler is None:
            return await ops.no_route(request)
        return await serve_exchange(request, handler, config, early_check=inference.is_wanted, bodies=bodies)

    async def expect(request: web.Request) -> None:
        await expect_continue(request, inference.is_wanted)

    async def name_no_software(request: web.Request, response: web.StreamResponse) -> None:
        response.headers.pop("server", None)

    app = web.Application(client_max_size=config.max_body_bytes, middlewares=[envelop_errors])
    app.on_response_prepare.append(name_no_software)
    app.router.add_post("/run", infer, expect_handler=expect)
    app.router.add_post("/ai-gateway/run", infer, expect_handler=expect)
    for path in PLAIN_PATHS:
        app.router.add_post(path, infer, expect_handler=expect)
    for routes in more:
        routes.add_to(app.router)
    app.router.add_post("/client/v4/accounts/{resource:.*}", infer, expect_handler=expect, name="inference")
    ops.add_to(app.router)
    return app
