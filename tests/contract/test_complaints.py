"""Complaints about Workers AI that nothing else tests here; docs/cases.md lists all of them."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any

import pytest

from billing.accounts import AccountDirectory
from billing.store import Store
from tests.support.fake_replica import FakeReplica, Script
from tests.support.gateway_harness import ACCOUNT, BILLING, MODEL, Harness

RUN = f"/run/{MODEL}"
MODELS_ONLY = "token-that-may-run-and-nothing-else-01"
Start = Callable[..., Awaitable[Harness]]

COST = """
query Cost($accountTag: String!) { viewer { accounts(filter: { accountTag: $accountTag }) {
  aiInferenceAdaptiveGroups(limit: 10, filter: { date_geq: "2020-01-01" }) {
    sum { totalNeurons totalInputTokens totalCachedInputTokens }
  } } } }
"""


async def test_a1_cached_tokens_are_wherever_usage_is(gateway: Harness, replicas: list[FakeReplica]) -> None:
    for cached in (0, 8):
        for replica in replicas:
            replica.script = Script(cached_tokens=cached)
        whole, stream = await gateway.chat(path=RUN), await gateway.chat(path=RUN, stream=True)
        usages = [frame["usage"] for frame in stream.frames[:-1] if frame.get("usage")]
        assert len(usages) >= 2  # the chunk without choices, and the native tail
        for usage in (whole.json["result"]["usage"], *usages):
            assert usage["prompt_tokens_details"]["cached_tokens"] == cached


async def test_a2_a_header_that_is_none_of_ours_changes_nothing(
    gateway: Harness, replicas: list[FakeReplica]
) -> None:
    """The beginning of the conversation decides then, and finds its cache all the same."""
    for number in range(6):
        assert (await gateway.chat(headers={"x-session-id": f"s{number}"})).status == 200
    assert sorted(len(replica.requests) for replica in replicas) == [0, 6]


async def test_a3_usage_header_log_bill_and_analytics_give_the_cached_price(
    gateway: Harness, replicas: list[FakeReplica]
) -> None:
    for replica in replicas:
        replica.script = Script(prompt_tokens=10_000, cached_tokens=9_000)
    reply = await gateway.chat(path=RUN, headers={"x-session-affinity": "ses_a3"})
    usage = reply.json["result"]["usage"]
    nanos = 1_000 * 600 + 9_000 * 100 + usage["completion_tokens"] * 3_000
    # 1,000 neurons cost 0.011 dollars, and a million tokens a whole number of neurons.
    assert usage["neurons"] == pytest.approx(nanos / 11_000, rel=1e-5)
    assert float(reply.headers["cf-ai-neurons"]) == usage["neurons"]

    request_id = reply.headers["cf-ai-req-id"]
    log = await _when_recorded(gateway, gateway.root(f"/ai-gateway/gateways/any/logs/{request_id}"))
    assert log["cost"] == nanos / 1e9
    rows = (await gateway.get("/usage?group_by=none")).json["result"]
    assert (rows[0]["amount_nanos"], rows[0]["cached_prompt_tokens"]) == (nanos, 9_000)
    receipt = (await gateway.get(f"/usage/{request_id}")).json["result"]["receipt"]
    assert receipt["amount_nanos"] == nanos
    query = {"query": COST, "variables": {"accountTag": ACCOUNT}}
    answer = (await gateway.post(gateway.root("/client/v4/graphql"), query)).json
    [group] = answer["data"]["viewer"]["accounts"][0]["aiInferenceAdaptiveGroups"]
    assert group["sum"]["totalCachedInputTokens"] == 9_000
    assert group["sum"]["totalNeurons"] == usage["neurons"]


async def test_a4_a_stream_has_one_total_and_it_comes_last(gateway: Harness) -> None:
    frames = (await gateway.chat(stream=True, stream_options={"include_usage": True})).frames
    assert [bool(frame.get("usage")) for frame in frames[:-1]] == [False] * (len(frames) - 2) + [True]
    native = [frame["usage"] for frame in (await gateway.chat(path=RUN, stream=True)).frames[:-1]
              if frame.get("usage")]  # fmt: skip
    assert native == [native[-1]] * len(native)  # said twice, never in parts


async def test_b7_a_choice_of_tools_that_is_none_says_what_is_allowed(gateway: Harness) -> None:
    tool = {"type": "function", "function": {"name": "f", "parameters": {"type": "object"}}}
    reply = await gateway.chat(path=RUN, tools=[tool], tool_choice="any")
    [error] = reply.json["errors"]
    assert (reply.status, error["code"]) == (400, 5006)
    assert "/tool_choice" in error["message"]
    assert all(word in error["message"] for word in ("none", "auto", "required"))


async def test_e2_e3_a_refusal_is_one_sentence_beside_its_code(
    gateway: Harness, replicas: list[FakeReplica]
) -> None:
    for replica in replicas:
        replica.script = Script(status=429)
    reply = await gateway.chat(path=RUN, options={"rejectIfBusy": True})
    assert (reply.status, [error["code"] for error in reply.json["errors"]]) == (429, [3040])
    message = reply.json["errors"][0]["message"]
    assert "Capacity temporarily exceeded" in message
    assert not any(mark in message for mark in "{}[]\n")
    assert int(reply.headers["retry-after"]) > 0


async def test_g3_a_token_that_may_only_run_lists_models_and_is_told_what_it_lacks(
    data_dir: Path, start_gateway: Start
) -> None:
    store = Store.open(BILLING.database_url_in(data_dir))
    AccountDirectory(store).import_token(ACCOUNT, MODELS_ONLY, "runs", ["ai:run"])
    store.close()
    gateway = await start_gateway()
    assert (await gateway.get("/models/search", token=MODELS_ONLY)).status == 200
    refused = await gateway.get("/usage", token=MODELS_ONLY)
    assert refused.status == 403
    assert "analytics:read" in refused.json["errors"][0]["message"]


async def test_g4_a_gateways_own_token_is_no_account_token_and_a_path_needs_run(gateway: Harness) -> None:
    body = {"messages": [{"role": "user", "content": "hi"}]}
    own = await gateway.post(RUN, body, token=None, headers={"cf-aig-authorization": "Bearer gateway"})
    assert (own.status, own.json["errors"][0]["code"]) == (401, 10000)
    both = await gateway.post(RUN, body, headers={"cf-aig-authorization": "Bearer gateway"})
    assert both.status == 200
    astray = await gateway.post(f"/{MODEL}", body)
    assert (astray.status, astray.json["errors"][0]["code"]) == (404, 7003)
    assert MODEL in astray.json["errors"][0]["message"]


@pytest.mark.parametrize("place", ["account", "token"])
async def test_g7_clients_of_anthropics_api_are_told_the_route_to_use(gateway: Harness, place: str) -> None:
    url = gateway.url("/v1/messages") if place == "account" else gateway.root("/v1/messages")
    body = {"model": MODEL, "max_tokens": 10, "messages": [{"role": "user", "content": "hi"}]}
    reply = await gateway.post(url, body)
    assert reply.status == 404
    error = reply.json["errors"][0] if place == "account" else reply.json["error"]
    assert "/v1/chat/completions" in error["message"]


async def _when_recorded(gateway: Harness, url: str) -> Any:
    async with asyncio.timeout(5):
        while True:
            reply = await gateway.get(url)
            if reply.status == 200:
                return reply.json["result"]
            await asyncio.sleep(0.02)
