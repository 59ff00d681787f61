"""Embeddings on every surface: forms, refusals, usage and its price."""

from __future__ import annotations

from typing import Any

import pytest

from backend.wire import ErrorDetail
from tests.support.fake_replica import FakeReplica
from tests.support.gateway_harness import EMBEDDINGS, MODEL, Harness

RUN = f"/run/{EMBEDDINGS}"
NEURONS = 0.0221  # 12 x 1841, in millionths, to four decimals


def received(replicas: list[FakeReplica]) -> dict[str, Any]:
    (request,) = replicas[0].requests + replicas[1].requests
    return request


async def test_native_vectors_are_enveloped_with_their_shape(gateway: Harness) -> None:
    reply = await gateway.post(RUN, {"text": ["ab", "abc"]})
    assert reply.status == 200, reply.body
    assert list(reply.json) == ["result", "success", "errors", "messages"]
    result = reply.json["result"]
    assert (result["shape"], result["data"], result["pooling"]) == ([2, 2], [[2.0, 0.0], [3.0, 1.0]], "mean")
    assert (result["usage"]["prompt_tokens"], result["usage"]["neurons"]) == (12, NEURONS)
    assert float(reply.headers["cf-ai-neurons"]) == NEURONS


async def test_a_native_text_may_stand_alone_and_names_its_pooling(
    gateway: Harness, replicas: list[FakeReplica]
) -> None:
    reply = await gateway.post("/run", {"model": EMBEDDINGS, "text": "abcd", "pooling": "cls"})
    assert (reply.json["result"]["data"], reply.json["result"]["pooling"]) == ([[4.0, 0.0]], "cls")
    assert received(replicas)["input_field"] == "text"


async def test_contexts_are_ranked_by_a_query_or_embedded(
    gateway: Harness, replicas: list[FakeReplica]
) -> None:
    """As bge-m3 has it. The scripted vectors are unit vectors in base64, all the same."""
    contexts = [{"text": "ab"}, {"text": "abc"}]
    ranked = await gateway.post(RUN, {"query": "a", "contexts": contexts})
    assert ranked.json["result"]["response"] == [{"id": 0, "score": 1.0}, {"id": 1, "score": 1.0}]
    assert ranked.json["result"]["usage"]["prompt_tokens"] == 12
    assert received(replicas)["inputs"] == ["a", "ab", "abc"]
    embedded = await gateway.post(RUN, {"contexts": contexts})
    assert embedded.json["result"]["response"] == [[2.0, 0.0], [3.0, 1.0]]
    assert embedded.json["result"]["shape"] == [2, 2]


async def test_the_binding_gets_them_bare(gateway: Harness) -> None:
    reply = await gateway.post(
        gateway.root("/run?version=3"),
        {"inputs": {"text": "ab"}, "options": {}},
        headers={"cf-consn-model-id": EMBEDDINGS},
    )
    assert (reply.status, reply.headers["content-type"]) == (200, "application/json")
    assert reply.json["shape"] == [1, 2]


@pytest.mark.parametrize("is_plain", [False, True])
@pytest.mark.parametrize(
    ("given", "arrives"),
    [
        ("ab", ["ab"]),
        (["ab", "abc"], ["ab", "abc"]),
        ([5, 6, 7], [[5, 6, 7]]),
        ([[5], [6, 7]], [[5], [6, 7]]),
    ],
)
async def test_openais_inputs(
    gateway: Harness, replicas: list[FakeReplica], is_plain: bool, given: Any, arrives: Any
) -> None:
    path = gateway.root("/v1/embeddings") if is_plain else "/v1/embeddings"
    reply = await gateway.post(path, {"model": EMBEDDINGS, "input": given, "user": "u"})
    assert reply.status == 200, reply.body
    assert received(replicas)["inputs"] == arrives
    assert list(reply.json) == ["object", "data", "model", "usage"]
    assert [entry["index"] for entry in reply.json["data"]] == list(range(len(arrives)))
    assert reply.json["usage"]["total_tokens"] == 12
    assert reply.headers["x-ratelimit-remaining-requests"] == "2999"


async def test_base64_passes_as_the_replica_wrote_it(gateway: Harness) -> None:
    body = {"model": EMBEDDINGS, "input": "ab", "encoding_format": "base64"}
    reply = await gateway.post("/v1/embeddings", body)
    assert reply.json["data"][0]["embedding"] == "AACAPwAAAAA="


@pytest.mark.parametrize(
    ("path", "body", "field"),
    [
        (RUN, {"messages": [{"role": "user", "content": "hi"}]}, "/text"),
        (RUN, {"text": []}, "/text"),
        (RUN, {"text": ["a", ""]}, "/text/1"),
        (RUN, {"text": "a", "pooling": "max"}, "/pooling"),
        (RUN, {"query": "a"}, "/contexts"),
        (RUN, {"query": "a", "contexts": []}, "/contexts"),
        (RUN, {"query": "", "contexts": [{"text": "b"}]}, "/query/0"),
        (RUN, {"contexts": [{"text": ""}]}, "/contexts/0"),
        (RUN, {"contexts": [{}]}, "/contexts/0"),
        (RUN, {"text": "a", "contexts": [{"text": "b"}]}, "/text"),
        ("/v1/embeddings", {"model": EMBEDDINGS}, "/input"),
        ("/v1/embeddings", {"input": "a"}, "/model"),
        ("/v1/embeddings", {"model": EMBEDDINGS, "input": ["a", 1]}, "/input"),
        ("/v1/embeddings", {"model": EMBEDDINGS, "input": {"a": 1}}, "/input"),
        ("/v1/embeddings", {"model": EMBEDDINGS, "input": "a", "encoding_format": "hex"}, "/encoding_format"),
        ("/v1/embeddings", {"model": EMBEDDINGS, "input": "a", "dimensions": 0}, "/dimensions"),
        ("/v1/embeddings", {"model": EMBEDDINGS, "input": ["a"] * 2049}, "/input"),
        ("/v1/embeddings", {"model": MODEL, "input": "a"}, "/model"),
        (
            "/v1/chat/completions",
            {"model": EMBEDDINGS, "messages": [{"role": "user", "content": "a"}]},
            "/model",
        ),
    ],
)
async def test_bad_input_is_named(
    gateway: Harness, replicas: list[FakeReplica], path: str, body: Any, field: str
) -> None:
    reply = await gateway.post(path, body)
    assert (reply.status, reply.json["errors"][0]["code"]) == (400, 5006), reply.body
    assert f"'{field}'" in reply.json["errors"][0]["message"]
    assert replicas[0].requests + replicas[1].requests == []


async def test_what_the_replica_refuses_reaches_the_client_by_name(
    gateway: Harness, replicas: list[FakeReplica]
) -> None:
    for replica in replicas:
        replica.script.status = 400
        replica.script.error = ErrorDetail(message="cannot be shortened", param="dimensions")
    reply = await gateway.post("/v1/embeddings", {"model": EMBEDDINGS, "input": "a", "dimensions": 8})
    assert reply.status == 400
    assert "'/dimensions': cannot be shortened" in reply.json["errors"][0]["message"]


async def test_a_full_replica_is_3040_at_once_when_asked(
    gateway: Harness, replicas: list[FakeReplica]
) -> None:
    for replica in replicas:
        replica.script.status = 429
    for path, body in (
        (RUN, {"text": "a", "options": {"rejectIfBusy": True}}),
        ("/v1/embeddings", {"model": EMBEDDINGS, "input": "a", "options": {"rejectIfBusy": True}}),
    ):
        reply = await gateway.post(path, body)
        assert (reply.status, reply.json["errors"][0]["code"]) == (429, 3040)
        assert reply.headers["retry-after"] == "1"


async def test_each_request_is_one_priced_record(gateway: Harness) -> None:
    await gateway.post(RUN, {"text": "a"}, headers={"x-session-affinity": "s"})
    await gateway.post(gateway.root("/v1/embeddings"), {"model": EMBEDDINGS, "input": ["a", "b"]})
    records = await gateway.stopped_records()
    assert [(record.surface, record.session) for record in records] == [("run", "s"), ("v1", "")]
    assert all(
        (record.model, record.status, record.prompt_tokens, record.completion_tokens)
        == (EMBEDDINGS, "ok", 12, 0)
        for record in records
    )
