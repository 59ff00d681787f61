"""OpenAI's routes under plain ``/v1``: the account is the token's, and refusals have OpenAI's form."""

from __future__ import annotations

from typing import Any

import pytest

from tests.support.fake_replica import FakeReplica
from tests.support.gateway_harness import (
    ACCOUNT,
    EMBEDDINGS,
    MODEL,
    OTHER_ACCOUNT,
    OTHER_TOKEN,
    Harness,
)

CHAT = {"model": MODEL, "messages": [{"role": "user", "content": "hi"}]}


async def test_the_account_is_the_tokens(gateway: Harness) -> None:
    mine = await gateway.post(gateway.root("/v1/chat/completions"), CHAT)
    assert mine.json["choices"][0]["message"]["content"] == "Hello, world"
    assert (await gateway.post(gateway.root("/v1/chat/completions"), CHAT, token=OTHER_TOKEN)).status == 200
    records = await gateway.stopped_records()
    assert [record.account_id for record in records] == [ACCOUNT, OTHER_ACCOUNT]
    assert {record.surface for record in records} == {"v1"}


async def test_streams_and_model_lists_are_those_of_the_account(gateway: Harness) -> None:
    streamed = await gateway.post(gateway.root("/v1/chat/completions"), CHAT | {"stream": True})
    assert (streamed.text, streamed.frames[-1]) == ("Hello, world", "[DONE]")
    models = await gateway.get(gateway.root("/v1/models"))
    assert {model["id"] for model in models.json["data"]} >= {MODEL, EMBEDDINGS}
    assert (await gateway.get(gateway.root("/v1/models"), token="wrong")).status == 401


@pytest.mark.parametrize(
    ("body", "token", "status", "code", "param"),
    [
        (CHAT, "wrong", 401, "invalid_api_key", None),
        (CHAT | {"model": "none"}, None, 400, "model_not_found", None),
        (CHAT | {"temperature": 9}, None, 400, "bad_input", "temperature"),
        ({"model": MODEL, "messages": [{"role": "x"}]}, None, 400, "bad_input", "messages.0.role"),
    ],
)
async def test_refusals_have_openais_form(
    gateway: Harness, body: Any, token: str | None, status: int, code: str, param: str | None
) -> None:
    options = {} if token is None else {"token": token}
    reply = await gateway.post(gateway.root("/v1/chat/completions"), body, **options)
    assert reply.status == status
    error = reply.json["error"]
    assert list(error) == ["message", "type", "param", "code"]
    assert (error["code"], error["param"]) == (code, param)


async def test_prompt_cache_key_is_an_affinity_key(gateway: Harness, replicas: list[FakeReplica]) -> None:
    """As OpenAI means it; the header is stronger."""
    for number in range(6):
        text = {"messages": [{"role": "user", "content": f"different {number}"}]}
        await gateway.post("/v1/chat/completions", CHAT | text | {"prompt_cache_key": "k"})
    assert sorted(len(replica.requests) for replica in replicas) == [0, 6]
    records = await gateway.stopped_records()
    assert {record.session for record in records} == {"k"}


@pytest.mark.parametrize("prefix", ["/v1", f"/client/v4/accounts/{ACCOUNT}/ai/v1"])
@pytest.mark.parametrize(
    ("path", "body", "member"),
    [
        ("/chat/completions", CHAT, "choices"),
        ("/completions", {"model": MODEL, "prompt": "hi"}, "choices"),
        ("/embeddings", {"model": EMBEDDINGS, "input": "hi"}, "data"),
        ("/responses", {"model": MODEL, "input": "hi"}, "output"),
    ],
)
async def test_both_transports_serve_every_surface(
    gateway: Harness, prefix: str, path: str, body: Any, member: str
) -> None:
    """A connection that begins with another request is aiohttp's from then on."""
    lean = await gateway.post(gateway.root(prefix + path), body)
    await gateway.get(gateway.root("/health"))
    taken_over = await gateway.post(gateway.root(prefix + path), body)
    for reply in (lean, taken_over):
        assert reply.status == 200, reply.body
        assert reply.json[member]
        assert reply.json["usage"]["neurons"] > 0
        assert len(reply.headers["cf-ai-req-id"]) == 36
        assert float(reply.headers["cf-ai-neurons"]) == reply.json["usage"]["neurons"]
