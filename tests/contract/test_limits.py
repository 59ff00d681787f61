"""Account limits over sockets: what is left, what is refused with which code, what a restart remembers."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from typing import Any

import msgspec
import pytest

from gateway.config import LimitsConfig, RateLimits
from tests.support.gateway_harness import BILLING, MODEL, Harness, gateway_config

pytestmark = pytest.mark.each_store

RUN = f"/run/{MODEL}"
Start = Callable[..., Awaitable[Harness]]


def limited(**limits: Any) -> Any:
    return gateway_config(limits=LimitsConfig(default=RateLimits(**limits)))


TWO_FREE = msgspec.structs.replace(BILLING, free_neurons_per_day=2)
"""Two neurons a day are free: one answer of the scripted replica and half of another."""


async def test_answers_on_v1_say_what_is_left(start_gateway: Start) -> None:
    gateway = await start_gateway(limited(requests_per_minute=60, tokens_per_minute=6000))
    first = await gateway.chat(max_tokens=10)
    second = await gateway.chat(max_tokens=10, stream=True)
    for reply, num_left in ((first, 59), (second, 58)):
        assert reply.headers["x-ratelimit-limit-requests"] == "60"
        assert reply.headers["x-ratelimit-remaining-requests"] == str(num_left)
        assert reply.headers["x-ratelimit-reset-requests"].endswith("s")
        assert reply.headers["x-ratelimit-limit-tokens"] == "6000"
    # The first answer is settled by its true count, the second still holds its estimate.
    assert int(second.headers["x-ratelimit-remaining-tokens"]) > 6000 - 15 - 100
    native = await gateway.chat(path=RUN)
    assert not [name for name in native.headers if name.startswith("x-ratelimit")]


async def test_tokens_without_a_limit_have_no_headers(gateway: Harness) -> None:
    reply = await gateway.chat()
    assert "x-ratelimit-limit-requests" in reply.headers
    assert "x-ratelimit-limit-tokens" not in reply.headers


async def test_too_many_tokens_a_minute_are_3021(start_gateway: Start) -> None:
    gateway = await start_gateway(limited(tokens_per_minute=100))
    assert (await gateway.chat(max_tokens=90)).status == 200
    refused = await gateway.chat(max_tokens=90)
    assert (refused.status, refused.json["errors"][0]["code"]) == (429, 3021)
    assert "tokens per min" in refused.json["errors"][0]["message"]
    assert 0 < int(refused.headers["retry-after"]) <= 60
    assert refused.headers["x-ratelimit-limit-tokens"] == "100"


async def test_used_up_neurons_are_refused_before_inference_on_every_surface(
    start_gateway: Start, replicas: list[Any]
) -> None:
    gateway = await start_gateway(limited(stops_at_free_neurons=True), billing=TWO_FREE)
    for _ in range(2):
        assert (await gateway.chat()).status == 200
    num_served = sum(len(replica.requests) for replica in replicas)
    binding = {"inputs": {"messages": [{"role": "user", "content": "hi"}]}}
    replies = {
        4006: [await gateway.chat(), await gateway.chat(path=RUN), await gateway.chat(stream=True)],
        3036: [
            await gateway.post(gateway.root("/run?version=3"), binding, headers={"cf-consn-model-id": MODEL})
        ],
    }
    for code, refusals in replies.items():
        for reply in refusals:
            assert (reply.status, reply.json["errors"][0]["code"]) == (429, code)
            assert "daily free allocation of 2 neurons" in reply.json["errors"][0]["message"]
            assert "T00:00:00Z" in reply.json["errors"][0]["message"]
            assert 0 < int(reply.headers["retry-after"]) <= 86_400
            assert reply.headers["x-should-retry"] == "false"
            assert "cf-ai-neurons" not in reply.headers
    plain = await gateway.post(
        gateway.root("/v1/chat/completions"), {"model": MODEL, "messages": binding["inputs"]["messages"]}
    )
    assert (plain.status, plain.json["error"]["code"]) == (429, "insufficient_quota")
    assert sum(len(replica.requests) for replica in replicas) == num_served


async def test_a_restart_remembers_what_was_used_today(start_gateway: Start) -> None:
    gateway = await start_gateway(limited(stops_at_free_neurons=True), billing=TWO_FREE)
    for _ in range(2):
        assert (await gateway.chat()).status == 200
    await gateway.stop()
    await gateway.start()
    assert (await gateway.chat()).json["errors"][0]["code"] == 4006


async def test_what_is_free_stands_in_the_records_and_the_rest_is_charged(start_gateway: Start) -> None:
    gateway = await start_gateway(billing=TWO_FREE)
    for _ in range(3):
        assert (await gateway.chat()).status == 200
    records = await gateway.stopped_records()
    assert [record.free_neurons_e4 for record in records] == [12_909, 20_000 - 12_909, 0]


async def test_what_could_not_be_recorded_uses_up_nothing(
    start_gateway: Start, monkeypatch: pytest.MonkeyPatch
) -> None:
    gateway = await start_gateway(limited(stops_at_free_neurons=True), billing=TWO_FREE)
    assert gateway.gateway is not None
    spool = gateway.gateway._books.spool
    append = spool.append

    def fail(records: Any) -> None:
        raise OSError("no space left on device")

    monkeypatch.setattr(spool, "append", fail)
    for _ in range(2):
        assert (await gateway.chat()).status == 503
    monkeypatch.setattr(spool, "append", append)
    async with asyncio.timeout(10):
        while (await gateway.chat()).status != 200:  # noqa: ASYNC110 - the journal tries again by the clock
            await asyncio.sleep(0.2)
    assert (await gateway.chat()).status == 200
    assert (await gateway.chat()).json["errors"][0]["code"] == 4006
