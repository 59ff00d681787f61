"""``env.AI.gateway(id)``: what is behind it is had, what is not is refused by name."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest

from tests.support.gateway_harness import ACCOUNT, MODEL, OTHER_TOKEN, TOKEN, Harness, Reply

MESSAGES = [{"role": "user", "content": "Say hello."}]


async def run(gateway: Harness) -> str:
    """The log id of one run through a gateway."""
    headers = {"cf-consn-model-id": MODEL, "x-session-affinity": "ses_log"}
    body = {"inputs": {"messages": MESSAGES}, "options": {"gateway": {"id": "gw1"}}}
    reply = await gateway.post(gateway.root("/ai-gateway/run?version=3"), body, headers=headers)
    assert reply.status == 200
    return reply.headers["cf-aig-log-id"]


async def log(gateway: Harness, log_id: str, token: str = TOKEN) -> Reply:
    return await gateway.get(gateway.root(f"/ai-gateway/gateways/gw1/logs/{log_id}"), token=token)


@pytest.mark.parametrize(("provider", "surface"), [("workers-ai", "run"), ("openai", "v1"), ("compat", "v1")])
async def test_urls_lead_to_own_surfaces(gateway: Harness, provider: str, surface: str) -> None:
    reply = await gateway.get(gateway.root(f"/ai-gateway/gateways/gw1/url/{provider}"))
    url = reply.json["result"]["url"]
    assert url == gateway.root(f"/client/v4/accounts/{ACCOUNT}/ai/{surface}")
    path = f"{url}/{MODEL}" if surface == "run" else f"{url}/chat/completions"
    assert (await gateway.chat(path=path)).status == 200


async def test_other_providers_are_refused_by_name(gateway: Harness) -> None:
    for provider in ("anthropic", "universal"):
        reply = await gateway.get(gateway.root(f"/ai-gateway/gateways/gw1/url/{provider}"))
        assert (reply.status, reply.json["errors"][0]["code"]) == (404, 7501)
        assert provider in reply.json["errors"][0]["message"]
    reply = await gateway.post(gateway.root("/ai-gateway/universal/run/gw1"), [])
    assert (reply.status, reply.json["errors"][0]["code"]) == (404, 7501)


async def test_a_log_is_the_usage_record(gateway: Harness) -> None:
    log_id = await run(gateway)
    reply = await log(gateway, log_id)
    for _ in range(100):
        if reply.status == 200:
            break
        await asyncio.sleep(0.05)
        reply = await log(gateway, log_id)
    result: dict[str, Any] = reply.json["result"]
    assert result.pop("created_at").endswith("Z")
    assert result.pop("duration") >= 0
    assert result == {
        "id": log_id,
        "provider": "workers-ai",
        "model": MODEL,
        "path": "/ai-gateway/run",
        "success": True,
        "cached": False,
        "tokens_in": 12,
        "tokens_out": 3,
        "cost": 0.0000142,
        "metadata": {"cached_tokens": 4, "session": "ses_log"},
    }
    foreign = await log(gateway, log_id, OTHER_TOKEN)
    assert (foreign.status, foreign.json["errors"][0]["code"]) == (404, 7404)


async def test_there_is_no_log_of_what_never_was_and_none_is_changed(gateway: Harness) -> None:
    assert (await log(gateway, "nothing")).status == 404
    assert (await log(gateway, "nothing", "wrong")).status == 401
    url = gateway.root("/ai-gateway/gateways/gw1/logs/nothing")
    headers = {"authorization": f"Bearer {TOKEN}"}
    async with gateway.session.patch(url, json={"feedback": 1}, headers=headers) as response:
        assert response.status == 404
        assert "no feedback" in (await response.json())["errors"][0]["message"]
