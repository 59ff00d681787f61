"""OpenAI's legacy completions, with OpenAI's own client."""

from __future__ import annotations

from collections.abc import AsyncIterator
from typing import Any

import openai
import pytest

from tests.support.fake_replica import FakeReplica
from tests.support.gateway_harness import MODEL, TOKEN, Harness


@pytest.fixture
async def client(gateway: Harness) -> AsyncIterator[openai.AsyncOpenAI]:
    async with openai.AsyncOpenAI(base_url=gateway.root("/v1"), api_key=TOKEN, max_retries=0) as client:
        yield client


async def test_a_prompt_is_answered_with_text(
    client: openai.AsyncOpenAI, gateway: Harness, replicas: list[FakeReplica]
) -> None:
    completion = await client.completions.create(model=MODEL, prompt="Say hello.", max_tokens=5, stop="x")
    assert completion.object == "text_completion"
    assert completion.choices[0].text == "Hello, world"
    assert completion.choices[0].finish_reason == "stop"
    assert completion.usage is not None
    assert completion.usage.prompt_tokens == 12
    (request,) = replicas[0].requests + replicas[1].requests
    assert request["messages"] == [{"role": "user", "content": "Say hello."}]
    assert (request["max_tokens"], request["stop"]) == (5, ["x"])
    (record,) = await gateway.stopped_records()
    assert (record.surface, record.completion_tokens) == ("v1", 3)


@pytest.mark.parametrize("includes_usage", [False, True])
async def test_streams_are_chunks_of_text(gateway: Harness, includes_usage: bool) -> None:
    body = {"model": MODEL, "prompt": ["Say hello."], "stream": True}
    if includes_usage:
        body["stream_options"] = {"include_usage": True}
    reply = await gateway.post("/v1/completions", body)
    *chunks, done = reply.frames
    assert done == "[DONE]"
    texts = [choice["text"] for chunk in chunks for choice in chunk["choices"]]
    assert "".join(texts) == "Hello, world"
    assert all(chunk["object"] == "text_completion" for chunk in chunks)
    assert [chunk["usage"]["prompt_tokens"] for chunk in chunks if chunk["usage"]] == [12] * includes_usage


@pytest.mark.parametrize(
    ("fields", "pointer"),
    [
        ({"prompt": None}, "/prompt"),
        ({"prompt": ""}, "/prompt"),
        ({"prompt": ["a", "b"]}, "/prompt"),
        ({"prompt": [1, 2]}, "/prompt"),
        ({"echo": True}, "/echo"),
        ({"suffix": "x"}, "/suffix"),
        ({"logprobs": 2}, "/logprobs"),
        ({"best_of": 3}, "/best_of"),
        ({"temperature": 3}, "/temperature"),
        ({"n": 9}, "/n"),
        ({"model": ""}, "/model"),
    ],
)
async def test_bad_input_is_named(gateway: Harness, fields: dict[str, Any], pointer: str) -> None:
    reply = await gateway.post("/v1/completions", {"model": MODEL, "prompt": "a"} | fields)
    assert (reply.status, reply.json["errors"][0]["code"]) == (400, 5006)
    assert f"'{pointer}'" in reply.json["errors"][0]["message"]
