"""A replica of an embedding model over a socket: answers, refusals, limits, the ends of requests."""

from __future__ import annotations

import asyncio
import base64
import struct
import threading
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import aiohttp
import msgspec
import pytest

from backend.embeddings.config import EmbeddingReplicaConfig
from backend.embeddings.server import EmbeddingServer
from tests.support.tiny_bert import write_tiny_bert

TOKEN = "pool-token"


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("bert") / "model"
    write_tiny_bert(path)
    return path


class Replica:
    def __init__(self, server: EmbeddingServer, session: aiohttp.ClientSession) -> None:
        self.server = server
        self.session = session

    async def post(self, path: str, body: Any, token: str = TOKEN) -> tuple[int, Any]:
        url = f"http://127.0.0.1:{self.server.port}{path}"
        headers = {"authorization": f"Bearer {token}"}
        async with self.session.post(url, data=msgspec.json.encode(body), headers=headers) as response:
            return response.status, await response.json()

    async def get(self, path: str) -> tuple[int, Any]:
        url = f"http://127.0.0.1:{self.server.port}{path}"
        async with self.session.get(url, headers={"authorization": f"Bearer {TOKEN}"}) as response:
            is_json = response.content_type == "application/json"
            return response.status, await response.json() if is_json else await response.text()

    async def embed(self, *inputs: Any, **fields: Any) -> tuple[int, Any]:
        body = {"request_id": "r", "model": "m", "inputs": list(inputs)} | fields
        return await self.post("/v1/embeddings", body)


@pytest.fixture
async def replica(model: Path) -> AsyncIterator[Replica]:
    config = EmbeddingReplicaConfig(
        replica_id="embeddings-0",
        model_path=str(model),
        served_as="m",
        port=0,
        pool_token=TOKEN,
        max_batch_tokens=12,
        max_waiting_inputs=6,
        max_queue_wait_s=0.3,
        shutdown_grace_s=2.0,
    )
    server = EmbeddingServer(config)
    await server.listen()
    async with aiohttp.ClientSession() as session:
        replica = Replica(server, session)
        status, health = await replica.get("/health")
        assert (status, health["status"], health["stage"]) == (503, "starting", "loading the model")
        assert (await replica.embed("a"))[0] == 503
        await server.load()
        yield replica
    await server.close()


async def test_texts_become_unit_vectors_in_order(replica: Replica) -> None:
    status, body = await replica.embed("a red fox", "the moon", "a red fox")
    assert status == 200
    assert [entry["index"] for entry in body["data"]] == [0, 1, 2]
    first, second, third = (entry["embedding"] for entry in body["data"])
    assert first == pytest.approx(third, abs=1e-6)
    assert first != pytest.approx(second, abs=1e-2)
    assert sum(x * x for x in first) == pytest.approx(1.0, abs=1e-5)
    assert (body["dimensions"], body["pooling"], body["model"]) == (24, "mean", "m")
    assert body["usage"]["prompt_tokens"] == body["usage"]["total_tokens"] == 5 + 4 + 5
    assert body["usage"]["completion_tokens"] == 0


async def test_base64_is_the_same_vector_in_float32(replica: Replica) -> None:
    _, floats = await replica.embed("a red fox")
    _, encoded = await replica.embed("a red fox", encoding_format="base64")
    raw = base64.b64decode(encoded["data"][0]["embedding"])
    assert struct.unpack("<24f", raw) == pytest.approx(floats["data"][0]["embedding"], abs=1e-7)


async def test_token_ids_are_those_of_the_model(replica: Replica) -> None:
    _, texts = await replica.embed("a red fox")
    _, tokens = await replica.embed([4, 5, 8])
    assert tokens["data"][0]["embedding"] == pytest.approx(texts["data"][0]["embedding"], abs=1e-6)
    status, body = await replica.embed([4, 99], input_field="input")
    assert (status, body["error"]["param"]) == (400, "input.0")
    status, body = await replica.embed([4], "a")
    assert (status, body["error"]["param"]) == (400, "input")


async def test_a_long_text_is_refused_by_name_or_cut(replica: Replica) -> None:
    long = "fox " * 40
    status, body = await replica.embed("a", long, input_field="text")
    assert (status, body["error"]["param"], body["error"]["code"]) == (
        400, "text.1", "context_length_exceeded",
    )  # fmt: skip
    assert "maximum context length of 16 tokens" in body["error"]["message"]
    status, body = await replica.embed("a", long, truncates=True)
    assert status == 200
    assert body["usage"]["prompt_tokens"] == 3 + 16


async def test_other_dimensions_are_refused(replica: Replica) -> None:
    assert (await replica.embed("a", dimensions=24))[0] == 200
    status, body = await replica.embed("a", dimensions=8)
    assert (status, body["error"]["param"]) == (400, "dimensions")


@pytest.mark.parametrize("body", [{}, {"request_id": "r", "model": "m", "inputs": []}, 7])
async def test_bodies_that_are_none_are_refused(replica: Replica, body: Any) -> None:
    assert (await replica.post("/v1/embeddings", body))[0] == 400
    assert (await replica.post("/v1/embeddings", body, token="wrong"))[0] == 401


class Gate:
    """Holds the computing thread until it is opened."""

    def __init__(self, replica: Replica) -> None:
        _, self._batcher = replica.server._state.serving()
        self._open = threading.Event()
        self.batches: list[int] = []
        embed = self._batcher._embed

        def held(inputs: Any, poolings: Any) -> Any:
            self.batches.append(len(inputs))
            assert self._open.wait(10)
            return embed(inputs, poolings)

        self._batcher._embed = held

    async def wait_until_held(self) -> None:
        async with asyncio.timeout(5):
            while not self.batches:  # noqa: ASYNC110 - a thread is waited for
                await asyncio.sleep(0.005)

    def open(self) -> None:
        self._open.set()


async def test_inputs_of_many_requests_share_batches_within_the_limit(replica: Replica) -> None:
    gate = Gate(replica)
    first = asyncio.create_task(replica.embed("a", request_id="1"))
    await gate.wait_until_held()
    others = [asyncio.create_task(replica.embed("a", "fox", request_id=f"o{n}")) for n in range(3)]
    await asyncio.sleep(0.1)
    gate.open()
    answers = await asyncio.gather(first, *others)
    assert [status for status, _ in answers] == [200] * 4
    assert gate.batches == [1, 4, 2], "four inputs of three tokens are a full batch of twelve"


async def test_the_queue_is_bounded_and_waits_are_too(replica: Replica) -> None:
    gate = Gate(replica)
    first = asyncio.create_task(replica.embed("a", request_id="1"))
    await gate.wait_until_held()
    status, body = await replica.embed("a", request_id="2", reject_if_busy=True)
    assert (status, body["error"]["code"]) == (429, "busy")
    status, body = await replica.embed(*["a"] * 7, request_id="3")
    assert (status, body["error"]["code"]) == (429, "queue_full")
    status, body = await replica.embed("a", request_id="4")
    assert (status, body["error"]["code"]) == (429, "queue_timeout")
    gate.open()
    assert (await first)[0] == 200
    assert (await replica.embed("a", request_id="5"))[0] == 200


async def test_ends_are_remembered_and_refusals_are_not(replica: Replica) -> None:
    await replica.embed("a red fox", request_id="served", billing_context="context")
    await replica.embed("fox " * 40, request_id="refused")
    _, page = await replica.get("/usages?after=0")
    (usage,) = page["usages"]
    assert (usage["request_id"], usage["billing_context"]) == ("served", "context")
    assert (usage["usage"]["prompt_tokens"], usage["finish_reason"]) == (5, "stop")
    _, page = await replica.get("/usages?request_id=refused")
    assert page["usages"] == []


async def test_a_reader_that_leaves_drops_what_is_not_computed_yet(replica: Replica) -> None:
    gate = Gate(replica)
    task = asyncio.create_task(replica.embed(*["a red fox"] * 5, request_id="left"))
    await gate.wait_until_held()
    task.cancel()
    await asyncio.gather(task, return_exceptions=True)
    status, result = await replica.post("/abort", {"request_id": "left"})
    gate.open()
    assert status == 200
    assert result["usage"]["usage"]["prompt_tokens"] == 10, "two of five inputs were in the first batch"
    assert result["usage"]["finish_reason"] == "abort"


async def test_a_draining_replica_takes_nothing_and_ends_what_it_has(replica: Replica) -> None:
    gate = Gate(replica)
    first = asyncio.create_task(replica.embed("a", request_id="1"))
    await gate.wait_until_held()
    draining = asyncio.create_task(replica.server.drain())
    await asyncio.sleep(0.05)
    assert (await replica.embed("a", request_id="2"))[0] == 503
    assert (await replica.get("/health"))[1]["status"] == "draining"
    gate.open()
    assert (await first)[0] == 200
    await draining


async def test_figures_and_metrics(replica: Replica) -> None:
    await replica.embed("a red fox")
    status, stats = await replica.get("/stats")
    assert (status, stats["replica_id"], stats["num_waiting"]) == (200, "embeddings-0", 0)
    status, text = await replica.get("/metrics")
    assert status == 200
    assert 'vllm:prompt_tokens_total{model_name="m"} 5.0' in text
