"""OpenAI's Responses over sockets, with OpenAI's own client."""

from __future__ import annotations

from collections.abc import AsyncIterator
from typing import Any

import openai
import pytest

from tests.support.fake_replica import FakeReplica
from tests.support.gateway_harness import ACCOUNT, MODEL, TOKEN, Harness


@pytest.fixture
async def client(gateway: Harness) -> AsyncIterator[openai.AsyncOpenAI]:
    async with openai.AsyncOpenAI(base_url=gateway.root("/v1"), api_key=TOKEN, max_retries=0) as client:
        yield client


async def test_an_answer_in_one_piece(client: openai.AsyncOpenAI, gateway: Harness) -> None:
    response = await client.responses.create(model=MODEL, instructions="Be brief.", input="Say hello.")
    assert (response.output_text, response.status, response.model) == ("Hello, world", "completed", MODEL)
    assert response.usage is not None
    assert (response.usage.input_tokens, response.usage.input_tokens_details.cached_tokens) == (12, 4)
    (record,) = await gateway.stopped_records()
    assert (record.surface, record.account_id, record.prompt_tokens) == ("v1", ACCOUNT, 12)
    assert response.id == f"resp_{record.request_id}"


async def test_a_stream_ends_when_its_usage_is_recorded(client: openai.AsyncOpenAI, gateway: Harness) -> None:
    stream = await client.responses.create(model=MODEL, input="Say hello.", stream=True, prompt_cache_key="s")
    events = [event async for event in stream]
    assert "".join(event.delta for event in events if event.type == "response.output_text.delta") == (
        "Hello, world"
    )
    assert events[-1].type == "response.completed"
    assert events[-1].response.output_text == "Hello, world"
    (record,) = await gateway.stopped_records()
    assert (record.status, record.completion_tokens, record.session) == ("ok", 3, "s")


async def test_the_conversation_goes_on_with_the_output_as_input(
    client: openai.AsyncOpenAI, replicas: list[FakeReplica]
) -> None:
    first = await client.responses.create(model=MODEL, input="Say hello.")
    history: list[Any] = [{"role": "user", "content": "Say hello."}, *first.output]
    await client.responses.create(model=MODEL, input=[*history, {"role": "user", "content": "Again."}])
    second = max((r for replica in replicas for r in replica.requests), key=lambda r: len(r["messages"]))
    assert [message["role"] for message in second["messages"]] == ["user", "assistant", "user"]
    assert second["messages"][1]["content"] == [{"type": "text", "text": "Hello, world"}]


async def test_what_would_have_to_be_stored_is_refused(client: openai.AsyncOpenAI) -> None:
    with pytest.raises(openai.BadRequestError) as refused:
        await client.responses.create(model=MODEL, input="hi", previous_response_id="resp_1")
    assert refused.value.param == "previous_response_id"
    with pytest.raises(openai.BadRequestError, match="are not kept here"):
        await client.responses.create(model=MODEL, input="hi", store=True)


async def test_below_an_account_refusals_of_the_model_layer_have_openais_form_too(gateway: Harness) -> None:
    reply = await gateway.post("/v1/responses", {"model": MODEL, "input": []})
    assert (reply.status, reply.json["error"]["param"]) == (400, "input")
    reply = await gateway.post("/v1/responses", {"model": MODEL, "input": "hi"}, token="wrong")
    assert (reply.status, reply.json["errors"][0]["code"]) == (401, 10000)
    reply = await gateway.post("/v1/responses", {"model": MODEL, "input": "hi"})
    assert reply.json["output"][0]["content"][0]["text"] == "Hello, world"
    assert reply.headers["x-ratelimit-limit-requests"] == "300"


async def test_a_lost_replica_ends_the_stream_in_a_failure(
    gateway: Harness, replicas: list[FakeReplica]
) -> None:
    for replica in replicas:
        replica.script.die_after = 2
    reply = await gateway.post("/v1/responses", {"model": MODEL, "input": "hi", "stream": True})
    assert reply.is_cut
    kinds = [line for line in reply.body.decode().splitlines() if line.startswith("event: ")]
    assert kinds[0] == "event: response.created"
    assert kinds[-2:] == ["event: response.failed", "event: error"]
    (record,) = await gateway.stopped_records()
    assert record.status == "replica_lost"
