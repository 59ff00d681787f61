"""What ``env.AI`` of a Worker sends and expects, at the level of its wire."""

from __future__ import annotations

import json
from collections.abc import Awaitable, Callable
from typing import Any
from urllib.parse import quote

import aiohttp
import pytest

from backend.wire import ErrorDetail
from gateway.config import LimitsConfig, RateLimits
from tests.support.fake_replica import FakeReplica
from tests.support.gateway_harness import ACCOUNT, MODEL, OTHER_ACCOUNT, TOKEN, Harness, Reply, gateway_config

MESSAGES = [{"role": "user", "content": "Say hello."}]
NEURONS = 1.2909


async def run(
    gateway: Harness,
    inputs: dict[str, Any] | None = None,
    options: dict[str, Any] | None = None,
    *,
    path: str = "/run?version=3",
    headers: dict[str, str] | None = None,
    token: str | None = TOKEN,
) -> Reply:
    """One call as the runtime makes it."""
    body = {"inputs": {"messages": MESSAGES} if inputs is None else inputs, "options": options or {}}
    fixed = {"cf-consn-model-id": MODEL, "cf-consn-sdk-version": "2.0.0"}
    return await gateway.post(gateway.root(path), body, headers=fixed | (headers or {}), token=token)


async def test_an_answer_is_bare_json_without_a_charset(gateway: Harness) -> None:
    reply = await run(gateway)
    assert reply.status == 200
    assert reply.headers["content-type"] == "application/json"
    assert reply.json["object"] == "chat.completion"
    assert reply.json["choices"][0]["message"]["content"] == "Hello, world"
    assert reply.json["usage"]["neurons"] == NEURONS
    assert len(reply.headers["cf-ai-req-id"]) == 36
    assert "cf-aig-log-id" not in reply.headers


async def test_a_stream_has_chunks_then_usage_then_the_native_tail(gateway: Harness) -> None:
    reply = await run(gateway, {"messages": MESSAGES, "stream": True})
    assert reply.headers["content-type"].startswith("text/event-stream")
    *chunks, usage, tail, done = reply.frames
    assert "".join(chunk["choices"][0]["delta"].get("content") or "" for chunk in chunks) == "Hello, world"
    assert usage["choices"] == []
    assert tail == {"response": "", "usage": usage["usage"]}
    assert tail["usage"]["neurons"] == NEURONS
    assert done == "[DONE]"


async def test_a_call_through_a_gateway_is_the_same_and_names_its_log(gateway: Harness) -> None:
    reply = await run(gateway, options={"gateway": {"id": "gw1"}}, path="/ai-gateway/run?version=3")
    assert reply.status == 200
    assert reply.json["choices"][0]["message"]["content"] == "Hello, world"
    assert reply.headers["cf-aig-log-id"] == reply.headers["cf-ai-req-id"]
    streamed = await run(gateway, {"messages": MESSAGES, "stream": True}, path="/ai-gateway/run?version=3")
    assert streamed.headers["cf-aig-log-id"] == streamed.headers["cf-ai-req-id"]


async def test_the_account_is_the_injected_one_or_the_tokens_own(gateway: Harness) -> None:
    assert (await run(gateway)).status == 200
    assert (await run(gateway, headers={"x-cf-account-id": ACCOUNT})).status == 200
    foreign = await run(gateway, headers={"x-cf-account-id": OTHER_ACCOUNT})
    assert foreign.status == 401
    assert foreign.json["internalCode"] == 10000
    records = await gateway.stopped_records()
    assert [(record.account_id, record.surface) for record in records] == [(ACCOUNT, "binding")] * 2


@pytest.mark.parametrize(
    ("headers", "options"),
    [
        ({"x-session-affinity": "ses_1"}, {"sessionAffinity": "other"}),
        ({}, {"sessionAffinity": "ses_1", "headers": {"x-session-affinity": "other"}}),
        ({}, {"headers": {"X-Session-Affinity": "ses_1"}}),
    ],
    ids=["header", "sessionAffinity", "headers"],
)
async def test_affinity_is_found_wherever_a_worker_leaves_it(
    gateway: Harness, headers: dict[str, str], options: dict[str, Any]
) -> None:
    assert (await run(gateway, options=options, headers=headers)).status == 200
    (record,) = await gateway.stopped_records()
    assert record.session == "ses_1"


async def test_a_stream_of_json_as_input_joins_the_other_inputs(
    gateway: Harness, replicas: list[FakeReplica]
) -> None:
    query = f"sessionAffinity=ses_2&version=3&userInputs={quote(json.dumps({'max_tokens': 7}))}"
    reply = await gateway.post(
        gateway.root(f"/run?{query}"), {"messages": MESSAGES}, headers={"cf-consn-model-id": MODEL}
    )
    assert reply.status == 200
    (request,) = [request for replica in replicas for request in replica.requests]
    assert request["max_tokens"] == 7
    (record,) = await gateway.stopped_records()
    assert record.session == "ses_2"


async def test_a_stream_of_anything_else_is_refused(gateway: Harness) -> None:
    query = f"version=3&userInputs={quote('{}')}"
    reply = await gateway.post(
        gateway.root(f"/run?{query}"), b"\xff\xd8\xff", headers={"cf-consn-model-id": MODEL}
    )
    assert reply.status == 400
    assert reply.json["description"].startswith("Bad input: '/inputs': a stream given as input")


async def test_errors_hold_what_the_runtime_makes_a_message_of(gateway: Harness) -> None:
    reply = await run(gateway, headers={"cf-consn-model-id": "@cf/nobody/nothing"})
    assert reply.status == 400
    assert reply.headers["content-type"] == "application/json"
    message = "No such model @cf/nobody/nothing or task"
    assert reply.json == {
        "internalCode": 5007,
        "description": message,
        "message": message,
        "errors": [{"code": 5007, "message": message}],
        "name": "InferenceUpstreamError",
        "success": False,
    }
    assert len(reply.headers["cf-ai-req-id"]) == 36


@pytest.mark.parametrize(
    ("body", "headers", "code", "text"),
    [
        (b"", {}, 3003, "body"),
        (b"{", {}, 5006, "not valid JSON"),
        (b"{}", {}, 5006, "'/inputs': is required"),
        (b'{"inputs":{"messages":[]}}', {}, 5006, "'/messages'"),
        (b'{"inputs":{"messages":1}}', {}, 5006, "'/messages'"),
        (b'{"inputs":{},"options":{"rejectIfBusy":1}}', {}, 5006, "'/options/rejectIfBusy'"),
        (b'{"inputs":[]}', {}, 5006, "'/'"),
        (b'{"inputs":{"prompt":"x"}}', {"cf-consn-model-id": ""}, 5006, "'/model': is required"),
    ],
)
async def test_bad_input_is_named(
    gateway: Harness, body: bytes, headers: dict[str, str], code: int, text: str
) -> None:
    reply = await gateway.post(
        gateway.root("/run?version=3"), body, headers={"cf-consn-model-id": MODEL} | headers
    )
    assert reply.status == 400
    assert reply.json["internalCode"] == code
    assert text in reply.json["description"]


async def test_a_rate_refusal_has_the_code_that_binding_clients_retry(
    start_gateway: Callable[..., Awaitable[Harness]],
) -> None:
    limits = LimitsConfig(default=RateLimits(requests_per_minute=1, burst_requests=1))
    gateway = await start_gateway(gateway_config(limits=limits))
    assert (await run(gateway)).status == 200
    reply = await run(gateway)
    assert reply.status == 429
    assert reply.json["internalCode"] == 3040
    assert int(reply.headers["retry-after"]) >= 1
    assert (await gateway.chat()).json["errors"][0]["code"] == 3021


async def test_reject_if_busy_is_read_from_the_options(gateway: Harness, replicas: list[FakeReplica]) -> None:
    for replica in replicas:
        replica.script.status = 429
        replica.script.error = ErrorDetail(message="full", code="queue_full")
    reply = await run(gateway, options={"rejectIfBusy": True})
    assert (reply.status, reply.json["internalCode"]) == (429, 3040)


async def test_the_prompt_form_works_and_get_does_not(gateway: Harness) -> None:
    assert (await run(gateway, {"prompt": "Say hello."})).status == 200
    reply = await gateway.get(gateway.root("/run?version=3"))
    assert (reply.status, reply.json["errors"][0]["code"]) == (405, 7001)
    again = await run(gateway)
    assert again.status == 200


async def test_both_transports_serve_the_binding(gateway: Harness) -> None:
    """A connection that has seen any other request is aiohttp's for good."""
    async with aiohttp.ClientSession(connector=aiohttp.TCPConnector(limit=1)) as session:
        async with session.get(gateway.root("/health")) as response:
            await response.read()
        headers = {"cf-consn-model-id": MODEL, "authorization": f"Bearer {TOKEN}"}
        body = {"inputs": {"messages": MESSAGES}, "options": {}}
        async with session.post(gateway.root("/run?version=3"), json=body, headers=headers) as response:
            assert response.status == 200
            assert response.headers["content-type"] == "application/json"


async def test_a_model_that_there_is_not_is_named_before_what_it_would_take(gateway: Harness) -> None:
    reply = await run(gateway, {"text": ["a"]}, headers={"cf-consn-model-id": "@cf/baai/bge-nothing"})
    assert (reply.status, reply.json["internalCode"]) == (400, 5007)
