"""What usage cost and what others would charge, over HTTP."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Awaitable, Callable
from typing import Any

import msgspec
import pytest

from billing.config import PriceListConfig
from gateway.batches.config import BatchesConfig
from tests.support.fake_replica import FakeReplica
from tests.support.gateway_harness import (
    BILLING,
    MODEL,
    OTHER_ACCOUNT,
    OTHER_TOKEN,
    Harness,
    gateway_config,
)

OTHER_LIST = PriceListConfig(
    name="Other", source="a page", as_of="2026-08-28", input="6.00", cached_input="6.00", output="30.00"
)
QUICK = BatchesConfig(poll_interval_s=0.05, sweep_interval_s=0.1)


@pytest.fixture
async def gateway(start_gateway: Callable[..., Awaitable[Harness]], replicas: list[FakeReplica]) -> Harness:
    for replica in replicas:
        replica.script.prompt_tokens, replica.script.cached_tokens = 1_000, 800
    billing = msgspec.structs.replace(BILLING, comparisons=[OTHER_LIST])
    return await start_gateway(gateway_config(batches=QUICK), billing=billing)


async def savings_of(gateway: Harness, query: str, num_requests: int) -> Any:
    """The answer, once so many requests are on the books."""
    async with asyncio.timeout(10):
        while True:
            reply = await gateway.get(f"/savings?{query}")
            assert reply.status == 200, reply.body
            if reply.json["result"]["num_requests"] == num_requests:
                return reply.json["result"]
            await asyncio.sleep(0.05)


async def test_a_session_is_priced_with_and_without_its_cache_and_elsewhere(gateway: Harness) -> None:
    for session in ("ses_1", "ses_1", "ses_2"):
        await gateway.chat(headers={"x-session-affinity": session})
    found = await savings_of(gateway, "session=ses_1", 2)
    output = found["tokens"]["num_output"]
    assert found["tokens"] == {"num_input": 400, "num_cached": 1_600, "num_output": output}
    assert found["cached_share"] == 0.8
    # 0.60, 0.10 and 3.00 dollars a million tokens.
    assert found["amount_nanos"] == 400 * 600 + 1_600 * 100 + output * 3_000
    assert found["saved_nanos"] == 1_600 * 500
    [other] = found["comparisons"]
    assert (other["name"], other["amount_nanos"]) == ("Other", 10 * found["undiscounted_nanos"])
    assert (await savings_of(gateway, "", 3))["tokens"]["num_cached"] == 2_400


async def test_one_batch_is_told_from_everything_else(gateway: Harness) -> None:
    await gateway.chat()
    requests = [{"prompt": "a"}, {"prompt": "b"}]
    queued = await gateway.post(f"/run/{MODEL}?queueRequest=true", {"requests": requests})
    found = await savings_of(gateway, f"batch={queued.json['result']['request_id']}", 2)
    assert (found["tokens"]["num_input"], found["tokens"]["num_cached"]) == (400, 1_600)
    assert found["amount_nanos"] == found["undiscounted_nanos"] - 1_600 * 500


@pytest.mark.parametrize(
    ("query", "status", "word"),
    [
        ("batch=unknown", 404, "batch"),
        (f"batch={'x' * 300}", 404, "batch"),
        ("batch=x&model=y", 400, "batch"),
        ("group_by=day", 400, "group_by"),
        ("since=yesterday", 400, "since"),
    ],
)
async def test_what_cannot_be_answered_is_named(gateway: Harness, query: str, status: int, word: str) -> None:
    reply = await gateway.get(f"/savings?{query}")
    assert reply.status == status
    assert word in reply.json["errors"][0]["message"]


async def test_it_is_for_its_account_alone(gateway: Harness) -> None:
    assert (await gateway.get("/savings", token=OTHER_TOKEN)).status == 401
    theirs = gateway.root(f"/client/v4/accounts/{OTHER_ACCOUNT}/ai/savings")
    assert (await gateway.get(theirs)).status == 401
    empty = await gateway.get(theirs, token=OTHER_TOKEN)
    assert json.loads(empty.body)["result"]["num_requests"] == 0
