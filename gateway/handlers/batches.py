"""``/v1/batches``: create, look at, list and cancel batches, and read their events."""

from __future__ import annotations

import asyncio
from collections.abc import Callable

import msgspec
from aiohttp import web

from billing.accounts import Principal
from gateway.auth import Authenticator
from gateway.batches.archive import BatchArchive
from gateway.batches.closing import BatchCloser
from gateway.batches.events import encode_event
from gateway.batches.jobs import Batch
from gateway.batches.native import queue_full
from gateway.batches.openai import BatchOrder, OpenAIBatches, list_object
from gateway.batches.queue import QueueFullError
from gateway.errors import bad_input, no_route
from gateway.handlers.v1_pages import json_answer, page_size, storing
from gateway.wire.openai import explain_decoding

_MAX_PAGE = 100
_PAGE = 20


class BatchRoutes:
    """Handlers of the aiohttp application. ``admit`` counts one submission against the account's rate and
    raises Refusal; ``wake`` tells the worker.
    """

    def __init__(
        self,
        authenticator: Authenticator,
        batches: OpenAIBatches,
        archive: BatchArchive,
        closer: BatchCloser,
        admit: Callable[[Principal, str], None],
        wake: Callable[[], None],
    ) -> None:
        self._authenticator = authenticator
        self._batches = batches
        self._archive = archive
        self._closer = closer
        self._admit = admit
        self._wake = wake

    def add_to(self, router: web.UrlDispatcher) -> None:
        """Add the routes, below an account and below the API token's own."""
        router.add_post("/client/v4/accounts/{account_id}/ai/v1/batches", self.create)
        router.add_get("/client/v4/accounts/{account_id}/ai/v1/batches", self.list)
        router.add_get("/client/v4/accounts/{account_id}/ai/v1/batches/{batch_id}", self.show)
        router.add_get("/client/v4/accounts/{account_id}/ai/v1/batches/{batch_id}/events", self.events)
        router.add_post("/client/v4/accounts/{account_id}/ai/v1/batches/{batch_id}/cancel", self.cancel)
        router.add_post("/v1/batches", self.create)
        router.add_get("/v1/batches", self.list)
        router.add_get("/v1/batches/{batch_id}", self.show)
        router.add_get("/v1/batches/{batch_id}/events", self.events)
        router.add_post("/v1/batches/{batch_id}/cancel", self.cancel)

    async def create(self, request: web.Request) -> web.Response:
        """Queue the lines of an uploaded file."""
        principal = await self._principal(request)
        try:
            order = msgspec.json.decode(await request.read(), type=BatchOrder)
        except (msgspec.DecodeError, UnicodeDecodeError) as error:
            raise explain_decoding(error) from error
        self._admit(principal, order.endpoint)
        try:
            with storing():
                batch = await asyncio.to_thread(self._batches.create, principal, order)
        except QueueFullError as error:
            raise queue_full(error) from error
        self._wake()
        return await self._answer(batch)

    async def show(self, request: web.Request) -> web.Response:
        """One batch."""
        return await self._answer(await self._find(request))

    async def list(self, request: web.Request) -> web.Response:
        """A page of the account's batches, newest first; native ones too."""
        principal = await self._principal(request)
        size = page_size(request, default=_PAGE, maximum=_MAX_PAGE)
        with storing():
            found = await asyncio.to_thread(
                self._archive.newest,
                principal.account_id,
                after=request.query.get("after", ""),
                max_batches=size + 1,
            )
            shown = await asyncio.to_thread(self._batches.show, found[:size])
        return json_answer(list_object(shown, has_more=len(found) > size))

    async def cancel(self, request: web.Request) -> web.Response:
        """Run no more items of a batch. One that has ended stays as it is, which is a 400."""
        batch = await self._find(request)
        with storing():
            has_cancelled = await asyncio.to_thread(self._closer.cancel, batch.account_id, batch.id)
        batch = await self._find(request)
        if not has_cancelled and batch.status not in ("cancelling", "cancelled"):
            raise bad_input("/batch_id", f"the batch has ended already: it is {batch.status}")
        return await self._answer(batch)

    async def events(self, request: web.Request) -> web.Response:
        """The batch's event log, oldest first (an extension)."""
        batch = await self._find(request)
        with storing():
            events = await asyncio.to_thread(self._archive.events, batch.id)
        data = [msgspec.Raw(encode_event(batch, event)) for event in events]
        return json_answer({"object": "list", "data": data, "has_more": False})

    async def _principal(self, request: web.Request) -> Principal:
        return await self._authenticator.authenticate(
            request.headers.get("authorization"), request.match_info.get("account_id", "")
        )

    async def _find(self, request: web.Request) -> Batch:
        principal = await self._principal(request)
        with storing():
            batch = await asyncio.to_thread(
                self._archive.find, principal.account_id, request.match_info["batch_id"]
            )
        if batch is None:
            raise no_route(request.path)
        return batch

    async def _answer(self, batch: Batch) -> web.Response:
        with storing():
            (shown,) = await asyncio.to_thread(self._batches.show, [batch])
        return json_answer(shown)
