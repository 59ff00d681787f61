"""Every refusal: status, code, form of the envelope, and that it names the one wrong field."""

from __future__ import annotations

import asyncio
import gzip
import os
import re
from collections.abc import Awaitable, Callable
from typing import Any

import msgspec
import pytest

from backend.wire import ErrorDetail
from gateway.config import LimitsConfig, RateLimits, RoutingConfig
from tests.support.fake_replica import FakeReplica
from tests.support.gateway_harness import (
    ACCOUNT,
    MODEL,
    OTHER_ACCOUNT,
    OTHER_TOKEN,
    TOKEN,
    Harness,
    Reply,
    gateway_config,
    open_books,
)

RUN = f"/run/{MODEL}"
CHAT = "/v1/chat/completions"
USER = {"role": "user", "content": "hi"}


def code_of(reply: Reply) -> int:
    return int(reply.json["errors"][0]["code"])


def message_of(reply: Reply) -> str:
    return str(reply.json["errors"][0]["message"])


def assert_inference_refusal(reply: Reply, status: int, code: int) -> None:
    """The inference layer's envelope: its key order, its message form, its request id."""
    assert reply.status == status
    assert list(reply.json) == ["errors", "success", "result", "messages"]
    assert (reply.json["success"], reply.json["result"], reply.json["messages"]) == (False, {}, [])
    assert list(reply.json["errors"][0]) == ["message", "code"]
    assert code_of(reply) == code
    request_id = reply.headers["cf-ai-req-id"]
    assert re.fullmatch(rf"AiError: .* \({request_id}\)", message_of(reply))
    assert "cf-ai-neurons" not in reply.headers
    assert reply.headers["cf-ray"]
    assert reply.headers["content-type"].startswith("application/json")


def assert_edge_refusal(reply: Reply, status: int, code: int) -> None:
    assert reply.status == status
    assert list(reply.json) == ["result", "success", "errors", "messages"]
    assert (reply.json["result"], reply.json["success"], reply.json["messages"]) == (None, False, [])
    assert list(reply.json["errors"][0]) == ["code", "message"]
    assert code_of(reply) == code
    assert "cf-ai-req-id" not in reply.headers
    assert reply.headers["cf-ray"]


@pytest.mark.parametrize("path", [CHAT, RUN])
@pytest.mark.parametrize("token", [None, "", "nonsense", OTHER_TOKEN])
async def test_a_missing_wrong_or_foreign_token_is_refused(
    gateway: Harness, path: str, token: str | None, replicas: list[FakeReplica]
) -> None:
    reply = await gateway.chat(path=path, token=token)
    assert_edge_refusal(reply, 401, 10000)
    assert message_of(reply) == "Authentication error"
    assert not replicas[0].requests + replicas[1].requests


async def test_the_body_of_a_stranger_is_not_looked_at(gateway: Harness) -> None:
    assert_edge_refusal(await gateway.post(CHAT, b"{broken", token="nonsense"), 401, 10000)


async def test_a_revoked_token_stops_working_within_seconds(gateway: Harness) -> None:
    from billing.accounts import AccountDirectory

    assert (await gateway.chat()).status == 200
    store = open_books(gateway.data_dir)
    directory = AccountDirectory(store)
    (token,) = directory.list_tokens(ACCOUNT)
    directory.revoke_token(token.id)
    store.close()
    await asyncio.sleep(gateway.config.auth.cache_ttl_s + 0.05)
    assert_edge_refusal(await gateway.chat(), 401, 10000)


@pytest.mark.parametrize(
    "path", ["/nothing", "/v1/nothing", "/runs/x", "/v1/chat/completions/more", "/workers-ai/x"]
)
async def test_an_unknown_route(gateway: Harness, path: str) -> None:
    reply = await gateway.chat(path=path)
    assert_edge_refusal(reply, 404, 7003)
    assert message_of(reply).startswith("Could not route to /client/v4/accounts/")
    assert reply.json["errors"][1] == {"code": 7000, "message": "No route for that URI"}


async def test_a_wrong_method(gateway: Harness) -> None:
    for path in (CHAT, RUN):
        reply = await gateway.get(path)
        assert_edge_refusal(reply, 405, 7001)
        assert message_of(reply) == "GET not supported for requested URI."
        assert reply.headers["allow"] == "POST"
    reply = await gateway.chat(path="/v1/models")
    assert_edge_refusal(reply, 405, 7001)
    assert reply.headers["allow"] == "GET, HEAD"


async def test_answers_do_not_name_the_software(gateway: Harness) -> None:
    for reply in (await gateway.chat(), await gateway.get("/v1/models"), await gateway.get("/nothing")):
        assert "server" not in reply.headers


@pytest.mark.parametrize("size", [10, 200_000])
async def test_a_compressed_body_is_refused_with_the_reason(gateway: Harness, size: int) -> None:
    body = gzip.compress(os.urandom(size))
    for path in (CHAT, RUN):
        reply = await gateway.post(path, body, headers={"content-encoding": "gzip"})
        assert_inference_refusal(reply, 415, 5006)
        assert "content-encoding 'gzip'" in message_of(reply)
    reply = await gateway.post(CHAT, body, headers={"content-encoding": "gzip"}, token="nonsense")
    assert_edge_refusal(reply, 401, 10000)
    plain = b'{"model":"%s","messages":[{"role":"user","content":"x"}]}' % MODEL.encode()
    reply = await gateway.post(CHAT, plain, headers={"content-encoding": "identity"})
    assert reply.status == 200


async def test_a_stranger_is_not_invited_to_send(gateway: Harness) -> None:
    assert gateway.gateway is not None
    reader, writer = await asyncio.open_connection("127.0.0.1", gateway.gateway.server.port)
    writer.write(
        f"POST /client/v4/accounts/{ACCOUNT}/ai{CHAT} HTTP/1.1\r\nHost: x\r\nAuthorization: Bearer no\r\n"
        "Content-Length: 30000000\r\nExpect: 100-continue\r\n\r\n".encode()
    )
    async with asyncio.timeout(5):
        answer = await reader.read()
    assert answer.startswith(b"HTTP/1.1 401 ")
    writer.close()


@pytest.mark.parametrize("path", ["/run/@cf/nobody/nothing", "/run/%40cf%2Fnobody%2Fnothing", CHAT])
async def test_an_unknown_model(gateway: Harness, path: str) -> None:
    reply = await gateway.chat(path=path, model="@cf/nobody/nothing")
    assert_inference_refusal(reply, 400, 5007)
    assert "No such model @cf/nobody/nothing or task" in message_of(reply)


TOOL: dict[str, Any] = {"type": "function", "function": {"name": "f"}}
BAD_FIELDS: list[tuple[dict[str, Any], str]] = [
    ({"messages": []}, "/messages"),
    ({"messages": None}, "/messages"),
    ({"messages": "hi"}, "/messages"),
    ({"messages": [USER, 3]}, "/messages/1"),
    ({"messages": [{"role": "robot", "content": "x"}]}, "/messages/0/role"),
    ({"messages": [{"content": "x"}]}, "/messages/0/role"),
    ({"messages": [{"role": "user"}]}, "/messages/0/content"),
    ({"messages": [{"role": "user", "content": None}]}, "/messages/0/content"),
    ({"messages": [{"role": "user", "content": 7}]}, "/messages/0/content"),
    ({"messages": [USER, {"role": "user", "content": [{"type": "text"}]}]}, "/messages/1/content/0/text"),
    ({"messages": [{"role": "user", "content": ["x"]}]}, "/messages/0/content/0"),
    (
        {
            "messages": [
                {"role": "user", "content": [{"type": "image_url", "image_url": {"url": "http://x"}}]}
            ]
        },
        "/messages/0/content/0/image_url/url",
    ),
    (
        {"messages": [{"role": "user", "content": [{"type": "video_url", "video_url": {"url": "data:"}}]}]},
        "/messages/0/content/0/type",
    ),
    (
        {"messages": [{"role": "user", "content": [{"type": "image_url", "image_url": {}}]}]},
        "/messages/0/content/0/image_url/url",
    ),
    (
        {"messages": [{"role": "assistant", "tool_calls": [{"id": 1}]}]},
        "/messages/0/tool_calls/0/function/name",
    ),
    ({"temperature": 2.1}, "/temperature"),
    ({"temperature": "hot"}, "/temperature"),
    ({"top_p": -0.1}, "/top_p"),
    ({"frequency_penalty": 3}, "/frequency_penalty"),
    ({"presence_penalty": -3}, "/presence_penalty"),
    ({"max_tokens": 0}, "/max_tokens"),
    ({"max_completion_tokens": -1}, "/max_completion_tokens"),
    ({"n": 0}, "/n"),
    ({"n": 9}, "/n"),
    ({"n": 129}, "/n"),
    ({"top_logprobs": 21, "logprobs": True}, "/top_logprobs"),
    ({"top_logprobs": 2}, "/top_logprobs"),
    ({"stop": ["a", "b", "c", "d", "e"]}, "/stop"),
    ({"stop": [""]}, "/stop"),
    ({"stop": 7}, "/stop"),
    ({"seed": "lucky"}, "/seed"),
    ({"stream": "yes"}, "/stream"),
    ({"stream_options": {"include_usage": "yes"}}, "/stream_options/include_usage"),
    ({"logit_bias": {"word": 1}}, "/logit_bias"),
    ({"logit_bias": {"7": 101}}, "/logit_bias"),
    ({"tool_choice": "any"}, "/tool_choice"),
    ({"tool_choice": "required"}, "/tool_choice"),
    ({"tools": [], "tool_choice": "required"}, "/tool_choice"),
    ({"tools": [TOOL], "tool_choice": {"type": "mcp"}}, "/tool_choice/type"),
    ({"tools": [TOOL], "tool_choice": {"type": "function"}}, "/tool_choice/function/name"),
    (
        {"tools": [TOOL], "tool_choice": {"type": "function", "function": {"name": "g"}}},
        "/tool_choice/function/name",
    ),
    ({"tools": [TOOL, {"type": "custom"}]}, "/tools/1/type"),
    ({"tools": [{"type": "function"}]}, "/tools/0/function"),
    ({"tools": [{"type": "function", "function": {"name": ""}}]}, "/tools/0/function/name"),
    ({"tools": [TOOL, TOOL]}, "/tools/1/function/name"),
    (
        {"tools": [{"type": "function", "function": {"name": "f", "description": False}}]},
        "/tools/0/function/description",
    ),
    (
        {"tools": [{"type": "function", "function": {"name": "f", "parameters": []}}]},
        "/tools/0/function/parameters",
    ),
    (
        {"tools": [{"type": "function", "function": {"name": "f", "strict": "yes"}}]},
        "/tools/0/function/strict",
    ),
    ({"thinking": "off"}, "/thinking"),
    ({"functions": [{"name": "f"}]}, "/functions"),
    ({"audio": {"voice": "alloy", "format": "wav"}}, "/audio"),
    ({"web_search_options": {}}, "/web_search_options"),
    ({"verbosity": "low"}, "/verbosity"),
    ({"metadata": {str(n): "x" for n in range(17)}}, "/metadata"),
    ({"response_format": {"type": "json_schema"}}, "/response_format/json_schema"),
    ({"response_format": {"type": "json_schema", "json_schema": []}}, "/response_format/json_schema"),
    (
        {"response_format": {"type": "json_schema", "json_schema": {"name": "n", "strict": True}}},
        "/response_format/json_schema/schema",
    ),
    (
        {"response_format": {"type": "json_schema", "json_schema": {"name": "n", "schema": "s"}}},
        "/response_format/json_schema/schema",
    ),
    ({"response_format": {"type": "xml"}}, "/response_format/type"),
    ({"modalities": ["text", "audio"]}, "/modalities"),
    ({"reasoning_effort": "extreme"}, "/reasoning_effort"),
    ({"options": {"rejectIfBusy": "yes"}}, "/options/rejectIfBusy"),
    ({"options": {"headers": {"x-session-affinity": 1}}}, "/options/headers"),
    ({"requests": [{"messages": [USER]}]}, "/requests"),
    ({"request_id": "abc"}, "/request_id"),
]


async def test_bad_input_names_the_one_wrong_field(gateway: Harness, replicas: list[FakeReplica]) -> None:
    """Complaint F1: one field, by its path, and no riddles about others."""
    for fields, pointer in BAD_FIELDS:
        for path in (RUN, CHAT):
            reply = await gateway.chat(path=path, **fields)
            assert_inference_refusal(reply, 400, 5006)
            assert message_of(reply).startswith(f"AiError: Bad input: '{pointer}': "), (
                fields,
                message_of(reply),
            )
    assert not replicas[0].requests + replicas[1].requests


@pytest.mark.parametrize("stream", [False, True])
async def test_a_refusal_has_its_real_status_also_when_streaming(gateway: Harness, stream: bool) -> None:
    """Complaint E6."""
    assert_inference_refusal(await gateway.chat(stream=stream, n=0), 400, 5006)


@pytest.mark.parametrize("body", [b"{", b"[]", b"\xff\xfe", b"[" * 100_000, b'{"model":"\\ud800"}', b"null"])
async def test_a_body_that_is_no_json_object(gateway: Harness, body: bytes) -> None:
    assert_inference_refusal(await gateway.post(CHAT, body), 400, 5006)


async def test_batches_are_refused_and_never_run_as_something_else(gateway: Harness) -> None:
    """Complaint E10: no silent other mode."""
    reply = await gateway.chat(path=f"{RUN}?queueRequest=true")
    assert_inference_refusal(reply, 400, 5006)
    assert "'/requests': is required with queueRequest" in message_of(reply)


async def test_an_empty_body(gateway: Harness) -> None:
    assert_inference_refusal(await gateway.post(RUN, b""), 400, 3003)


async def test_unknown_fields_and_nulls_are_tolerated(gateway: Harness) -> None:
    """Complaint F4."""
    reply = await gateway.chat(
        seed=None,
        temperature=None,
        stop=None,
        tools=[],
        tool_choice="auto",
        n=1,
        user="u",
        store=True,
        metadata={"a": "b"},
        service_tier="auto",
        response_format={"type": "text"},
        parallel_tool_calls=True,
        guided_json={"type": "object"},
        whatever=[1, {"a": None}],
        options={"tags": ["a"], "gateway": {"id": "g"}},
    )
    assert reply.status == 200


@pytest.mark.parametrize("is_hot", [True, False])
async def test_a_body_that_is_too_large(
    start_gateway: Callable[..., Awaitable[Harness]], is_hot: bool
) -> None:
    gateway = await start_gateway(gateway_config(max_body_bytes=10_000))
    if not is_hot:
        await gateway.get(gateway.root("/health"))
    reply = await gateway.chat(padding="x" * 20_000)
    assert reply.status == 413
    assert code_of(reply) == 3006
    assert list(reply.json) == ["errors", "success", "result", "messages"]


@pytest.mark.parametrize("path", [RUN, CHAT])
@pytest.mark.parametrize("stream", [False, True])
async def test_context_overflow_is_a_400_with_the_sentence_agents_look_for(
    gateway: Harness, replicas: list[FakeReplica], path: str, stream: bool
) -> None:
    """BR-64, BR-66, complaint F5: once, at full length, with the real status, unbilled."""
    sentence = (
        "Requested token count exceeds the model's maximum context length of 4096 tokens. You requested a "
        "total of 5000 tokens: 4744 tokens from the input messages and 256 tokens for the completion. "
        "Please reduce the "
        "number of tokens in the input messages or the completion to fit within the limit."
    )
    for replica in replicas:
        replica.script.status = 400
        replica.script.error = ErrorDetail(message=sentence, code="context_length_exceeded", param="messages")
    reply = await gateway.chat(path=path, stream=stream)
    assert_inference_refusal(reply, 400, 8007)
    assert message_of(reply).count("maximum context length of 4096 tokens") == 1
    assert message_of(reply).count("AiError") == 1
    assert await gateway.stopped_records() == []


async def test_what_a_replica_says_about_a_field_reaches_the_client(
    gateway: Harness, replicas: list[FakeReplica]
) -> None:
    for replica in replicas:
        replica.script.status = 400
        replica.script.error = ErrorDetail(message="token 99 is not in the vocabulary", param="logit_bias")
    reply = await gateway.chat(logit_bias={"99": 1})
    assert_inference_refusal(reply, 400, 5006)
    assert "'/logit_bias': token 99 is not in the vocabulary" in message_of(reply)


async def test_full_replicas_give_3040(gateway: Harness, replicas: list[FakeReplica]) -> None:
    """Complaints E1, E2: at once, 429, with Retry-After; both replicas were asked."""
    for replica in replicas:
        replica.script.status = 429
    reply = await gateway.chat(stream=True)
    assert_inference_refusal(reply, 429, 3040)
    assert int(reply.headers["retry-after"]) >= 1
    assert len(replicas[0].requests) == len(replicas[1].requests) == 1


async def test_capacity_waits_are_bounded_and_reject_if_busy_does_not_wait(
    start_gateway: Callable[..., Awaitable[Harness]], replicas: list[FakeReplica]
) -> None:
    """Complaint E1: a bounded wait, then 3040; ``rejectIfBusy`` is refused at once, on both surfaces."""
    gateway = await start_gateway(
        gateway_config(routing=RoutingConfig(max_in_flight=1, capacity_wait_s=0.3)), replicas=replicas[:1]
    )
    replicas[0].script.token_delay_s = 0.35
    loop = asyncio.get_running_loop()
    first = asyncio.create_task(gateway.chat(stream=True))
    await asyncio.sleep(0.2)
    for path in (RUN, CHAT):
        started = loop.time()
        reply = await gateway.chat(path=path, options={"rejectIfBusy": True})
        assert_inference_refusal(reply, 429, 3040)
        assert loop.time() - started < 0.15
    started = loop.time()
    assert_inference_refusal(await gateway.chat(), 429, 3040)
    assert 0.25 < loop.time() - started < 0.6
    assert (await first).frames[-1] == "[DONE]"


async def test_a_waiting_request_gets_the_place_that_becomes_free(
    start_gateway: Callable[..., Awaitable[Harness]], replicas: list[FakeReplica]
) -> None:
    gateway = await start_gateway(
        gateway_config(routing=RoutingConfig(max_in_flight=1, capacity_wait_s=5)), replicas=replicas[:1]
    )
    replicas[0].script.token_delay_s = 0.03
    replies = await asyncio.gather(*(gateway.chat() for _ in range(5)))
    assert [reply.status for reply in replies] == [200] * 5


async def test_reject_if_busy_reaches_the_replica(gateway: Harness, replicas: list[FakeReplica]) -> None:
    await gateway.chat(options={"rejectIfBusy": True})
    (request,) = replicas[0].requests + replicas[1].requests
    assert request["reject_if_busy"] is True


async def test_too_many_requests_a_minute_give_3021_before_any_inference(
    start_gateway: Callable[..., Awaitable[Harness]], replicas: list[FakeReplica]
) -> None:
    """BR-90: with the true time to wait; then it works."""
    limits = RateLimits(requests_per_minute=60, burst_requests=2)
    gateway = await start_gateway(gateway_config(limits=LimitsConfig(default=limits)))
    assert [(await gateway.chat()).status for _ in range(2)] == [200, 200]
    reply = await gateway.chat()
    assert_inference_refusal(reply, 429, 3021)
    assert "inference request per min rate reached" in message_of(reply)
    assert reply.headers["retry-after"] == "1"
    assert reply.headers["x-ratelimit-limit-requests"] == "60"
    assert reply.headers["x-ratelimit-remaining-requests"] == "0"
    assert len(replicas[0].requests + replicas[1].requests) == 2
    other = await gateway.post(
        gateway.root(f"/client/v4/accounts/{OTHER_ACCOUNT}/ai{CHAT}"),
        {"model": MODEL, "messages": [USER]},
        token=OTHER_TOKEN,
    )
    assert other.status == 200
    await asyncio.sleep(1)
    assert (await gateway.chat()).status == 200


async def test_too_many_requests_at_once_give_3040(
    start_gateway: Callable[..., Awaitable[Harness]], replicas: list[FakeReplica]
) -> None:
    limits = RateLimits(max_concurrent_requests=2)
    gateway = await start_gateway(gateway_config(limits=LimitsConfig(accounts={ACCOUNT: limits})))
    for replica in replicas:
        replica.script.token_delay_s = 0.1
    running = [asyncio.create_task(gateway.chat(stream=True)) for _ in range(2)]
    await asyncio.sleep(0.1)
    reply = await gateway.chat()
    assert_inference_refusal(reply, 429, 3040)
    assert int(reply.headers["retry-after"]) >= 1
    await asyncio.gather(*running)
    assert (await gateway.chat()).status == 200


async def test_no_replica_at_all_is_a_503_that_says_so(gateway: Harness, replicas: list[FakeReplica]) -> None:
    for replica in replicas:
        await replica.stop()
    reply = await gateway.chat()
    assert_inference_refusal(reply, 503, 3050)
    assert int(reply.headers["retry-after"]) >= 1


async def test_a_replica_that_says_nothing_gives_3007(
    start_gateway: Callable[..., Awaitable[Harness]], replicas: list[FakeReplica]
) -> None:
    for replica in replicas:
        replica.script.token_delay_s = 30
    upstream = gateway_config().upstream
    changes = {"first_byte_timeout_s": 0.3, "request_timeout_s": 0.6}
    config = gateway_config(upstream=msgspec.structs.replace(upstream, **changes))
    gateway = await start_gateway(config)
    loop = asyncio.get_running_loop()
    for stream, wait_s in ((True, 0.3), (False, 0.6)):
        started = loop.time()
        assert_inference_refusal(await gateway.chat(stream=stream), 408, 3007)
        assert wait_s <= loop.time() - started < wait_s + 0.5


async def test_internal_headers_from_outside_are_ignored(
    gateway: Harness, replicas: list[FakeReplica]
) -> None:
    """BR-85, BR-87: no header makes a caller trusted, and credentials go no further than the edge."""
    forged = {
        "x-forwarded-for": "127.0.0.1",
        "x-real-ip": "127.0.0.1",
        "x-account-id": OTHER_ACCOUNT,
        "x-cf-account-id": OTHER_ACCOUNT,
        "x-request-id": "forged",
        "x-internal-token": "forged",
        "cf-ai-req-id": "forged",
        "x-auth-key": TOKEN,
        "cookie": "session=secret",
    }
    assert_edge_refusal(await gateway.chat(token=None, headers=forged), 401, 10000)
    reply = await gateway.chat(headers=forged, cache_salt="mine", billing_context="mine", request_id=None)
    assert reply.headers["cf-ai-req-id"] != "forged"
    (request,) = replicas[0].requests + replicas[1].requests
    (headers,) = replicas[0].headers + replicas[1].headers
    assert TOKEN not in str(headers) + str(request)
    assert headers["authorization"].startswith("Bearer ")
    assert not set(forged) & set(headers)
    assert request["cache_salt"] not in ("", "mine")
    assert OTHER_ACCOUNT not in request["billing_context"]
    (record,) = await gateway.stopped_records()
    assert record.account_id == ACCOUNT
    assert record.request_id == reply.headers["cf-ai-req-id"] == request["request_id"]


async def test_a_prompt_beside_messages_is_refused_by_name(gateway: Harness) -> None:
    reply = await gateway.post(RUN, {"messages": [USER], "prompt": "and this"})
    assert_inference_refusal(reply, 400, 5006)
    assert "'/prompt'" in message_of(reply)
