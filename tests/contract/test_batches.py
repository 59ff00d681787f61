"""Asynchronous batches on the native surfaces, over sockets."""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any

import msgspec
import pytest

from backend.wire import ErrorDetail
from gateway.app import Gateway
from gateway.batches.config import BatchesConfig
from gateway.config import ReplicaAddress, RoutingConfig
from tests.support.fake_replica import FakeReplica, Script
from tests.support.gateway_harness import (
    ACCOUNT,
    BILLING,
    EMBEDDINGS,
    MODEL,
    MODELS,
    OTHER_TOKEN,
    Harness,
    Reply,
    billing_in,
    gateway_config,
)
from tests.support.waiting import eventually

pytestmark = pytest.mark.each_store

StartGateway = Callable[..., Awaitable[Harness]]

RUN = f"/run/{MODEL}"
QUICK = BatchesConfig(
    poll_interval_s=0.05,
    sweep_interval_s=0.1,
    retry_initial_s=0.1,
    lease_s=2.0,
    max_payload_bytes=500_000,
    max_items=100,
)


def quick_config(**changes: Any) -> Any:
    return gateway_config(batches=QUICK, **changes)


def chat(text: str = "Say hello.", **fields: Any) -> dict[str, Any]:
    return {"messages": [{"role": "user", "content": text}], **fields}


async def submit(gateway: Harness, requests: list[Any], **options: Any) -> str:
    reply = await gateway.post(f"{RUN}?queueRequest=true", {"requests": requests}, **options)
    assert reply.status == 200, reply.body
    result = reply.json["result"]
    assert result == {"status": "queued", "request_id": reply.headers["cf-ai-req-id"], "model": MODEL}
    return str(result["request_id"])


async def poll(gateway: Harness, request_id: str, timeout_s: float = 10.0) -> dict[str, Any]:
    """Poll until there are results."""
    async with asyncio.timeout(timeout_s):
        while True:
            reply = await gateway.post(RUN, {"request_id": request_id})
            assert reply.status == 200, reply.body
            assert reply.json["success"] is True
            result: dict[str, Any] = reply.json["result"]
            if "status" not in result:
                return result
            assert result["status"] in ("queued", "running")
            await asyncio.sleep(0.02)


async def metrics_of(gateway: Harness) -> dict[str, float]:
    """What the gateway exports about batches."""
    text = (await gateway.get(gateway.root("/metrics"))).body.decode()
    lines = [line for line in text.splitlines() if line.startswith("embergate_batch")]
    return {name: float(value) for name, value in (line.rsplit(" ", 1) for line in lines)}


class TestRest:
    async def test_results_come_sorted_under_both_names_with_references(
        self, start_gateway: StartGateway
    ) -> None:
        gateway = await start_gateway(quick_config())
        requests = [chat(f"question {10 - n}", external_reference=f"ref-{n}") for n in range(10)]
        result = await poll(gateway, await submit(gateway, [*requests, chat("no reference")]))
        assert result["responses"] == result["results"]
        assert [item["id"] for item in result["responses"]] == list(range(11))
        assert [item["index"] for item in result["responses"]] == list(range(11))
        references = [item["external_reference"] for item in result["responses"]]
        assert references == [*(f"ref-{n}" for n in range(10)), None]
        for item in result["responses"]:
            assert item["success"] is True
            assert item["result"]["choices"][0]["message"]["content"] == "Hello, world"
            assert item["result"]["usage"]["prompt_tokens_details"]["cached_tokens"] == 4
            assert item["result"]["usage"]["neurons"] > 0
        assert result["usage"]["total_tokens"] == 11 * 15
        records = await gateway.stopped_records()
        assert len(records) == 11
        assert {record.surface for record in records} == {"batch"}

    async def test_one_bad_item_does_not_fail_the_batch(self, start_gateway: StartGateway) -> None:
        gateway = await start_gateway(quick_config())
        bad = [chat(temperature=99, external_reference="hot"), {"messages": []}, 7, chat(stream=True)]
        result = await poll(gateway, await submit(gateway, [chat(), *bad]))
        assert [item["success"] for item in result["responses"]] == [True, False, False, False, False]
        hot = result["responses"][1]
        assert "/temperature" in hot["error"]
        assert hot["external_reference"] == "hot"
        assert "result" not in hot
        assert "/stream" in result["responses"][4]["error"]
        assert len(await gateway.stopped_records()) == 1

    async def test_embeddings_are_batched_too(self, start_gateway: StartGateway) -> None:
        gateway = await start_gateway(quick_config())
        path = f"/run/{EMBEDDINGS}"
        ranked = {"query": "a", "contexts": [{"text": "ab"}]}
        items = [{"text": ["ab"]}, {"text": 7}, ranked]
        reply = await gateway.post(f"{path}?queueRequest=true", {"requests": items})
        result = await poll(gateway, reply.json["result"]["request_id"])
        assert result["responses"][0]["result"]["data"] == [[2.0, 0.0]]
        assert result["responses"][0]["result"]["shape"] == [1, 2]
        assert "/text" in result["responses"][1]["error"]
        assert result["responses"][2]["result"]["response"] == [{"id": 0, "score": 1.0}]

    async def test_queue_request_in_the_body_is_no_submission(self, start_gateway: StartGateway) -> None:
        gateway = await start_gateway(quick_config())
        reply = await gateway.post(RUN, {"queueRequest": True, **chat()})
        assert reply.json["result"]["choices"][0]["message"]["content"] == "Hello, world"
        reply = await gateway.post(RUN, {"queueRequest": True, "requests": [chat()]})
        assert (reply.status, reply.json["errors"][0]["code"]) == (400, 5006)
        assert "queueRequest=true" in reply.json["errors"][0]["message"]

    async def test_what_cannot_be_a_batch_is_refused(self, start_gateway: StartGateway) -> None:
        gateway = await start_gateway(quick_config())
        for body, word in (
            ({}, "/requests"),
            ({"requests": []}, "/requests"),
            ({"requests": "many"}, "/requests"),
            ({"requests": [chat()] * 101}, "/requests"),
            ({"request_id": 7}, "/request_id"),
            ({"request_id": "unknown"}, "/request_id"),
        ):
            reply = await gateway.post(f"{RUN}?queueRequest=true", body)
            assert reply.status == 400, body
            assert word in reply.json["errors"][0]["message"]
        reply = await gateway.post(f"/run/{MODEL}x?queueRequest=true", {"requests": [chat()]})
        assert (reply.status, reply.json["errors"][0]["code"]) == (400, 5007)

    async def test_too_large_a_payload_is_413(self, start_gateway: StartGateway) -> None:
        gateway = await start_gateway(quick_config())
        reply = await gateway.post(f"{RUN}?queueRequest=true", {"requests": [chat("x" * 500_000)]})
        assert (reply.status, reply.json["errors"][0]["code"]) == (413, 3006)

    async def test_only_its_account_sees_a_batch(self, start_gateway: StartGateway) -> None:
        gateway = await start_gateway(quick_config())
        request_id = await submit(gateway, [chat()])
        reply = await gateway.post(RUN, {"request_id": request_id}, token=OTHER_TOKEN)
        assert reply.status == 401
        others = gateway.root(f"/client/v4/accounts/{'fedcba9876543210' * 2}/ai{RUN}")
        reply = await gateway.post(others, {"request_id": request_id}, token=OTHER_TOKEN)
        assert reply.status == 400
        reply = await gateway.post(f"{RUN}?queueRequest=true", {"requests": [chat()]}, token=None)
        assert reply.status == 401

    async def test_a_chat_about_request_ids_is_a_chat(self, start_gateway: StartGateway) -> None:
        gateway = await start_gateway(quick_config())
        parameters = {"type": "object", "properties": {"request_id": {"type": "string"}}}
        tool = {"type": "function", "function": {"name": "find", "parameters": parameters}}
        reply = await gateway.post(RUN, chat('{"request_id": "a", "requests": []}', tools=[tool]))
        assert "choices" in reply.json["result"]


class TestBinding:
    async def post(self, gateway: Harness, inputs: Any, **options: Any) -> Reply:
        headers = {"cf-consn-model-id": MODEL, "x-cf-account-id": ACCOUNT}
        body = {"inputs": inputs, "options": options}
        return await gateway.post(gateway.root("/run?version=3"), body, headers=headers)

    async def test_submits_by_option_and_answers_bare(self, start_gateway: StartGateway) -> None:
        gateway = await start_gateway(quick_config())
        reply = await self.post(gateway, {"requests": [chat()]}, queueRequest=True)
        assert reply.headers["content-type"] == "application/json"
        assert reply.json["status"] == "queued"
        await poll(gateway, reply.json["request_id"])
        reply = await self.post(gateway, {"request_id": reply.json["request_id"]})
        assert [item["success"] for item in reply.json["responses"]] == [True]

    async def test_an_unknown_batch_is_an_error_of_the_binding(self, start_gateway: StartGateway) -> None:
        gateway = await start_gateway(quick_config())
        reply = await self.post(gateway, {"request_id": "unknown"})
        assert (reply.status, reply.json["internalCode"]) == (400, 5006)


class TestRunning:
    async def test_items_with_one_prefix_run_on_one_replica(
        self, start_gateway: StartGateway, replicas: list[FakeReplica]
    ) -> None:
        gateway = await start_gateway(quick_config())
        for replica in replicas:
            replica.script = Script(token_delay_s=0.01)
        system = {group: f"You are reviewer {group}. " + "Be exact. " * 200 for group in range(6)}
        requests = [
            {"messages": [{"role": "system", "content": system[n % 6]}, *chat(f"file {n}")["messages"]]}
            for n in range(60)
        ]
        await poll(gateway, await submit(gateway, requests))
        seen: dict[str, set[str]] = {}
        for replica in replicas:
            for request in replica.requests:
                seen.setdefault(request["messages"][0]["content"], set()).add(replica.id)
        assert len(seen) == 6
        # An idle replica helps out at the end, so a group may have a second home; most have one.
        assert sum(len(homes) == 1 for homes in seen.values()) >= 4
        assert all(request["reject_if_busy"] for replica in replicas for request in replica.requests)

    async def test_busy_replicas_are_asked_again_later(
        self, start_gateway: StartGateway, replicas: list[FakeReplica]
    ) -> None:
        gateway = await start_gateway(quick_config())
        for replica in replicas:
            replica.script = Script(status=429, error=ErrorDetail(message="full", code="busy"))
        request_id = await submit(gateway, [chat()])
        await asyncio.sleep(0.5)
        for replica in replicas:
            replica.script = Script()
        result = await poll(gateway, request_id)
        assert result["responses"][0]["success"] is True
        assert len(await gateway.stopped_records()) == 1

    async def test_survives_a_restart(self, start_gateway: StartGateway, replicas: list[FakeReplica]) -> None:
        gateway = await start_gateway(quick_config())
        for replica in replicas:
            replica.script = Script(token_delay_s=5.0)
        request_id = await submit(gateway, [chat(f"question {n}") for n in range(20)])
        await asyncio.sleep(0.2)
        await gateway.stop()
        for replica in replicas:
            replica.script = Script()
        await gateway.start()
        result = await poll(gateway, request_id)
        assert sum(item["success"] for item in result["responses"]) == 20
        assert len(await gateway.stopped_records()) == 20

    async def test_a_replica_that_dies_costs_an_attempt_only(
        self, start_gateway: StartGateway, replicas: list[FakeReplica]
    ) -> None:
        gateway = await start_gateway(quick_config())
        replicas[0].script = Script(die_before_head=True)
        result = await poll(gateway, await submit(gateway, [chat(f"question {n}") for n in range(6)]))
        assert sum(item["success"] for item in result["responses"]) == 6
        assert len(await gateway.stopped_records()) == 6

    async def test_an_item_that_always_fails_fails_alone(
        self, start_gateway: StartGateway, replicas: list[FakeReplica]
    ) -> None:
        config = gateway_config(
            batches=BatchesConfig(
                poll_interval_s=0.05, sweep_interval_s=0.1, retry_initial_s=0.05, max_failures=2
            )
        )
        gateway = await start_gateway(config)
        for replica in replicas:
            replica.script = Script(status=500, error=ErrorDetail(message="broken", code="engine_error"))
        result = await poll(gateway, await submit(gateway, [chat()]))
        assert result["responses"][0]["success"] is False
        assert await gateway.stopped_records() == []

    @pytest.mark.slow
    async def test_live_requests_win(self, start_gateway: StartGateway, replicas: list[FakeReplica]) -> None:
        """Items fill every place; live requests that find none get theirs, and the items lose nothing."""
        gateway = await start_gateway(
            quick_config(routing=RoutingConfig(max_in_flight=4, capacity_wait_s=2.0))
        )
        for replica in replicas:
            replica.script = Script(token_delay_s=1.5)
        request_id = await submit(gateway, [chat(f"question {n}") for n in range(20)])
        await eventually(lambda: sum(len(replica.requests) for replica in replicas) == 8)
        for replica in replicas:
            replica.script = Script()
        replies = await asyncio.gather(*(gateway.chat() for _ in range(6)))
        assert [reply.status for reply in replies] == [200] * 6
        result = await poll(gateway, request_id)
        assert sum(item["success"] for item in result["responses"]) == 20
        assert (await metrics_of(gateway))["embergate_batch_items_preempted_total"] >= 1
        records = await gateway.stopped_records()
        assert Counter(record.surface for record in records) == {"batch": 20, "v1": 6}
        assert {record.status for record in records} == {"ok"}

    async def test_two_gateways_share_a_queue(
        self, start_gateway: StartGateway, replicas: list[FakeReplica], data_dir: Path
    ) -> None:
        first = await start_gateway(quick_config())
        shared = msgspec.structs.replace(BILLING, database_url=billing_in(data_dir).database_url_in(data_dir))
        addresses = [ReplicaAddress(id=replica.id, url=replica.url) for replica in replicas]
        second = Gateway(quick_config(), MODELS, addresses, shared, data_dir / "second")
        await second.start()
        for replica in replicas:
            replica.script = Script(token_delay_s=0.02)
        try:
            request_id = await submit(first, [chat(f"question {n}") for n in range(80)])
            result = await poll(first, request_id)
            ended = second.metrics.export().decode()
        finally:
            await second.stop()
        assert sum(item["success"] for item in result["responses"]) == 80
        assert 'embergate_batch_items_ended_total{outcome="succeeded"}' in ended
        assert len(await first.stopped_records()) == 80

    @pytest.mark.slow
    async def test_metrics_tell_what_waits(
        self, start_gateway: StartGateway, replicas: list[FakeReplica]
    ) -> None:
        gateway = await start_gateway(quick_config())
        for replica in replicas:
            replica.script = Script(token_delay_s=1.0)
        request_id = await submit(gateway, [chat(f"question {n}") for n in range(40)])
        for _ in range(100):
            values = await metrics_of(gateway)
            if values['embergate_batch_items{state="leased"}'] == 16:
                break
            await asyncio.sleep(0.05)
        assert values['embergate_batch_items{state="queued"}'] == 24
        assert values["embergate_batch_oldest_queued_seconds"] > 0.05
        for replica in replicas:
            replica.script = Script()
        await poll(gateway, request_id)
        assert (await metrics_of(gateway))['embergate_batch_items_ended_total{outcome="succeeded"}'] == 40
