"""Lets another replica compute a request's prompt first, where the gateway says so."""

from __future__ import annotations

import asyncio
from dataclasses import replace

from aiohttp import web

from backend.http.calls import Call
from backend.http.errors import bad_request
from backend.http.generation import GenerationPlan
from backend.transfer.fetching import Fetch, Fetcher
from backend.transfer.prompts import Prompt
from backend.transfer.service import split_address
from backend.wire import PREFILL_HEADER


def read_place(http: web.Request) -> tuple[str, int] | None:
    """Where the prompt is to be computed; None for here.

    Raises:
        ReplicaError: 400 when that is no address.
    """
    address = http.headers.get(PREFILL_HEADER)
    if address is None:
        return None
    try:
        return split_address(address)
    except ValueError as error:
        raise bad_request(PREFILL_HEADER, str(error)) from error


class Prefill:
    """The prompt of one request, computed elsewhere; close it when the request is over.

    Whatever comes of it, :meth:`plan` says how to go on from there.
    """

    def __init__(self, fetcher: Fetcher, plan: GenerationPlan) -> None:
        self._plan = plan
        self._fetch: Fetch = fetcher.fetch(Prompt(plan.prompt_token_ids, plan.cache_salt, plan.media))

    async def run(self, call: Call, place: tuple[str, int]) -> None:
        """Bring the prompt's blocks. An abort of the call ends it early."""
        task = call.prefill = asyncio.create_task(self._fetch.run(*place))
        try:
            await asyncio.wait([task])
        finally:
            call.prefill = None
            task.cancel()
            await asyncio.gather(task, return_exceptions=True)

    @property
    def was_admitted(self) -> bool:
        """Whether the other replica began with it: from then on the prompt is owed."""
        return self._fetch.cached_tokens is not None

    @property
    def plan(self) -> GenerationPlan:
        """The plan from here on."""
        return replace(
            self._plan,
            lease_id=self._fetch.lease_id,
            told_cached_tokens=self._fetch.told_cached_tokens,
            was_admitted=self.was_admitted,
        )

    def close(self) -> None:
        """Keep no blocks for it any more."""
        self._fetch.close()
