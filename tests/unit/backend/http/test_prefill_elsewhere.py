"""Requests whose prompt the gateway lets another replica compute."""

from __future__ import annotations

import asyncio
from types import SimpleNamespace
from typing import Any, cast

import pytest

from backend.transfer.prompts import Prompt
from tests.support.scripted_replica import Answer, Replica
from tests.support.waiting import eventually

PLACE = {"x-embergate-prefill": "10.0.0.7:9123"}
LEASE_ID = 5


class StubFetch:
    """What a fetch says of itself; it takes until it is told to end."""

    lease_id = LEASE_ID

    def __init__(self, prompt: Prompt) -> None:
        self.prompt = prompt
        self.places: list[tuple[str, int]] = []
        self.cached_tokens: int | None = None
        self.may_end = asyncio.Event()
        self.is_closed = False

    @property
    def told_cached_tokens(self) -> int | None:
        return self.cached_tokens

    async def run(self, host: str, port: int) -> None:
        self.places.append((host, port))
        await self.may_end.wait()

    def close(self) -> None:
        self.is_closed = True


class StubFetcher:
    def __init__(self) -> None:
        self.fetches: list[StubFetch] = []

    def fetch(self, prompt: Prompt) -> StubFetch:
        self.fetches.append(StubFetch(prompt))
        return self.fetches[-1]


@pytest.fixture
def fetcher(replica: Replica) -> StubFetcher:
    stub = StubFetcher()
    service = SimpleNamespace(fetcher=stub, address="", close=_nothing, wait_idle=_nothing)
    replica.server._state.transfers = cast(Any, service)
    return stub


async def _nothing() -> None:
    return


def ask(replica: Replica, **fields: Any) -> asyncio.Task[Answer]:
    body = replica.request(**fields)
    return asyncio.create_task(replica.call("POST", "/v1/chat/completions", json=body, headers=PLACE))


async def begun(fetcher: StubFetcher) -> StubFetch:
    await eventually(lambda: bool(fetcher.fetches and fetcher.fetches[-1].places), interval_s=0.001)
    return fetcher.fetches[-1]


async def test_the_answer_waits_for_the_prompt_and_counts_what_was_cached_there(
    replica: Replica, fetcher: StubFetcher
) -> None:
    replica.say("abc", cached_prompt_tokens=0)
    running = ask(replica)
    fetch = await begun(fetcher)
    assert fetch.places == [("10.0.0.7", 9123)]
    assert not replica.engine.requests
    fetch.cached_tokens = 3
    fetch.may_end.set()
    answer = (await running).json
    (request,) = replica.engine.requests
    assert (request.lease_id, request.told_cached_tokens) == (LEASE_ID, 3)
    assert request.prompt_token_ids == fetch.prompt.token_ids
    assert answer["usage"]["prompt_tokens_details"]["cached_tokens"] == 3
    assert fetch.is_closed


async def test_a_request_without_the_header_asks_nobody(replica: Replica, fetcher: StubFetcher) -> None:
    replica.say("abc")
    assert (await replica.complete()).status == 200
    assert not fetcher.fetches
    assert replica.engine.requests[0].lease_id == 0


async def test_a_place_that_is_none_is_refused(replica: Replica) -> None:
    for place in ("nowhere", "host:", "host:0", "host:70000", ":1"):
        headers = {"x-embergate-prefill": place}
        answer = await replica.call("POST", "/v1/chat/completions", json=replica.request(), headers=headers)
        assert answer.status == 400
        assert answer.json["error"]["param"] == "x-embergate-prefill"


async def test_an_abort_ends_the_wait_for_the_prompt(replica: Replica, fetcher: StubFetcher) -> None:
    replica.say("abc", delay_s=30)
    running = ask(replica, request_id="x")
    fetch = await begun(fetcher)
    aborted = (await replica.call("POST", "/abort", json={"request_id": "x"})).json
    answer = (await running).json
    assert answer["choices"][0]["finish_reason"] == "abort"
    assert aborted["usage"]["usage"]["total_tokens"] == 0
    assert fetch.is_closed


@pytest.mark.parametrize("was_admitted", [True, False])
async def test_who_leaves_owes_the_prompt_once_it_was_admitted_there(
    replica: Replica, fetcher: StubFetcher, was_admitted: bool
) -> None:
    replica.say("abc", delay_s=30)
    running = ask(replica)
    fetch = await begun(fetcher)
    fetch.cached_tokens = 2 if was_admitted else None
    running.cancel()
    await eventually(lambda: fetch.is_closed and replica.engine.num_open == 0)
    usages = await replica.usages()
    if not was_admitted:
        assert usages == []
        return
    (usage,) = usages
    assert usage["usage"]["prompt_tokens"] == len(fetch.prompt.token_ids)
    assert usage["usage"]["prompt_tokens_details"]["cached_tokens"] == 2
    assert usage["usage"]["completion_tokens"] == 0
    assert usage["finish_reason"] == "abort"
