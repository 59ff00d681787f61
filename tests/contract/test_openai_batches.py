"""OpenAI's files and batches, over sockets, below an account and below the token's own."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Awaitable, Callable
from typing import Any

import aiohttp
import pytest

from backend.wire import ErrorDetail
from gateway.batches.config import BatchesConfig
from tests.support.fake_replica import FakeReplica, Script
from tests.support.gateway_harness import (
    EMBEDDINGS,
    MODEL,
    OTHER_TOKEN,
    TOKEN,
    Harness,
    Reply,
    gateway_config,
)

pytestmark = pytest.mark.each_store

StartGateway = Callable[..., Awaitable[Harness]]

QUICK = BatchesConfig(
    poll_interval_s=0.05,
    sweep_interval_s=0.1,
    retry_initial_s=0.1,
    max_file_bytes=50_000,
    max_stored_bytes=60_000,
    max_open_batches=2,
)


@pytest.fixture
async def gateway(start_gateway: StartGateway) -> Harness:
    return await start_gateway(gateway_config(batches=QUICK))


@pytest.fixture(params=["account", "token"])
def base(request: pytest.FixtureRequest, gateway: Harness) -> str:
    """Both places where the routes are."""
    return gateway.url("/v1") if request.param == "account" else gateway.root("/v1")


def line(custom_id: str, text: str = "Say hello.", **fields: Any) -> str:
    body = {"model": MODEL, "messages": [{"role": "user", "content": text}], **fields}
    return json.dumps({"custom_id": custom_id, "method": "POST", "url": "/v1/chat/completions", "body": body})


async def call(
    gateway: Harness, method: str, url: str, *, token: str | None = TOKEN, **options: Any
) -> Reply:
    headers = {} if token is None else {"authorization": f"Bearer {token}"}
    async with gateway.session.request(method, url, headers=headers, **options) as response:
        names = {name.lower(): value for name, value in response.headers.items()}
        return Reply(response.status, names, await response.read())


async def upload(gateway: Harness, base: str, content: str, purpose: str | None = "batch") -> Reply:
    form = aiohttp.FormData()
    form.add_field("file", content.encode(), filename="input.jsonl")
    if purpose is not None:
        form.add_field("purpose", purpose)
    return await call(gateway, "POST", f"{base}/files", data=form)


async def create(gateway: Harness, base: str, content: str, **changes: Any) -> Reply:
    uploaded = await upload(gateway, base, content)
    assert uploaded.status == 200, uploaded.body
    order = {
        "input_file_id": uploaded.json["id"],
        "endpoint": "/v1/chat/completions",
        "completion_window": "24h",
    }
    return await call(gateway, "POST", f"{base}/batches", json=order | changes)


async def finished(gateway: Harness, base: str, batch_id: str) -> dict[str, Any]:
    async with asyncio.timeout(10):
        while True:
            batch: dict[str, Any] = (await call(gateway, "GET", f"{base}/batches/{batch_id}")).json
            if batch["status"] not in ("in_progress", "cancelling"):
                return batch
            await asyncio.sleep(0.02)


async def lines_of(gateway: Harness, base: str, file_id: str) -> list[Any]:
    reply = await call(gateway, "GET", f"{base}/files/{file_id}/content")
    assert reply.status == 200
    shown = (await call(gateway, "GET", f"{base}/files/{file_id}")).json
    assert shown["bytes"] == len(reply.body)
    return [json.loads(each) for each in reply.body.splitlines()]


def message_of(reply: Reply) -> str:
    body = reply.json
    return str(body["errors"][0]["message"] if "errors" in body else body["error"]["message"])


class TestBatches:
    async def test_lines_go_in_and_come_out(self, gateway: Harness, base: str) -> None:
        content = "\n".join([line("a"), line("bad", temperature=9), line("c", "Something else.")])
        reply = await create(gateway, base, content, metadata={"night": "monday"})
        assert reply.status == 200, reply.body
        assert reply.json["object"] == "batch"
        assert reply.json["metadata"] == {"night": "monday"}
        assert reply.json["expires_at"] - reply.json["created_at"] == 86_400
        batch = await finished(gateway, base, reply.json["id"])
        assert batch["status"] == "completed"
        assert batch["request_counts"] == {"total": 3, "completed": 2, "failed": 1}
        assert batch["usage"]["total_tokens"] == 30
        assert batch["usage"]["input_tokens_details"] == {"cached_tokens": 8}
        output = await lines_of(gateway, base, batch["output_file_id"])
        assert [each["custom_id"] for each in output] == ["a", "c"]
        for each in output:
            assert each["error"] is None
            assert each["response"]["status_code"] == 200
            assert each["response"]["body"]["choices"][0]["message"]["content"] == "Hello, world"
            assert each["response"]["body"]["usage"]["neurons"] > 0
        (error,) = await lines_of(gateway, base, batch["error_file_id"])
        assert (error["custom_id"], error["response"]["status_code"]) == ("bad", 400)
        assert "/temperature" in error["response"]["body"]["error"]["message"]
        ids = {each["response"]["request_id"] for each in output}
        records = await gateway.stopped_records()
        assert {record.request_id for record in records} == ids
        assert {record.surface for record in records} == {"batch"}

    async def test_other_endpoints_answer_in_their_own_form(self, gateway: Harness, base: str) -> None:
        for endpoint, body, key in (
            ("/v1/embeddings", {"model": EMBEDDINGS, "input": ["ab", "abc"]}, "data"),
            ("/v1/responses", {"model": MODEL, "input": "Say hello.", "store": False}, "output"),
        ):
            one = {"custom_id": "a", "method": "POST", "url": endpoint, "body": body}
            reply = await create(gateway, base, json.dumps(one), endpoint=endpoint)
            batch = await finished(gateway, base, reply.json["id"])
            assert batch["request_counts"]["completed"] == 1, batch
            (each,) = await lines_of(gateway, base, batch["output_file_id"])
            assert key in each["response"]["body"]
            assert each["response"]["body"]["usage"]

    async def test_a_file_that_cannot_be_read_fails_with_its_lines(self, gateway: Harness, base: str) -> None:
        reply = await create(gateway, base, line("a") + "\n{broken\n" + line("a"))
        assert reply.status == 200
        batch = reply.json
        assert batch["status"] == "failed"
        assert [(each["code"], each["line"]) for each in batch["errors"]["data"]] == [
            ("invalid_json_line", 2),
            ("duplicate_custom_id", 3),
        ]
        assert batch["failed_at"] >= batch["created_at"]

    async def test_cancelling_keeps_what_is_done(
        self, gateway: Harness, base: str, replicas: list[FakeReplica]
    ) -> None:
        for replica in replicas:
            replica.script = Script(token_delay_s=0.1)
        reply = await create(gateway, base, "\n".join(line(f"r{n}", f"q {n}") for n in range(60)))
        await asyncio.sleep(0.5)
        url = f"{base}/batches/{reply.json['id']}/cancel"
        cancelled = await call(gateway, "POST", url)
        assert cancelled.json["status"] in ("cancelling", "cancelled")
        batch = await finished(gateway, base, reply.json["id"])
        assert batch["status"] == "cancelled"
        counts = batch["request_counts"]
        assert counts["completed"] + counts["failed"] == counts["total"] == 60
        assert 0 < counts["completed"] < 60
        errors = await lines_of(gateway, base, batch["error_file_id"])
        assert {each["error"]["code"] for each in errors} == {"batch_cancelled"}
        assert len(await lines_of(gateway, base, batch["output_file_id"])) == counts["completed"]
        assert (await call(gateway, "POST", url)).status == 200
        records = await gateway.stopped_records()
        assert len(records) == counts["completed"]

    async def test_what_has_not_run_by_the_deadline_expires(
        self, start_gateway: StartGateway, replicas: list[FakeReplica]
    ) -> None:
        config = BatchesConfig(
            poll_interval_s=0.05, sweep_interval_s=0.1, retry_initial_s=0.1, deadline_s=0.5
        )
        gateway = await start_gateway(gateway_config(batches=config))
        for replica in replicas:
            replica.script = Script(status=429, error=ErrorDetail(message="full", code="busy"))
        base = gateway.root("/v1")
        reply = await create(gateway, base, line("a"))
        batch = await finished(gateway, base, reply.json["id"])
        assert batch["status"] == "expired"
        assert batch["output_file_id"] is None
        (error,) = await lines_of(gateway, base, batch["error_file_id"])
        assert error["error"]["code"] == "batch_expired"
        assert await gateway.stopped_records() == []

    async def test_an_ended_batch_cannot_be_cancelled(self, gateway: Harness, base: str) -> None:
        batch_id = (await create(gateway, base, line("a"))).json["id"]
        await finished(gateway, base, batch_id)
        reply = await call(gateway, "POST", f"{base}/batches/{batch_id}/cancel")
        assert reply.status == 400
        assert "completed" in message_of(reply)

    async def test_events_and_native_batches_are_listed(self, gateway: Harness, base: str) -> None:
        native = await gateway.post(f"/run/{MODEL}?queueRequest=true", {"requests": [{"prompt": "hello"}]})
        native_id = native.json["result"]["request_id"]
        await finished(gateway, base, native_id)
        batch_id = (await create(gateway, base, line("a"))).json["id"]
        await finished(gateway, base, batch_id)
        page = (await call(gateway, "GET", f"{base}/batches?limit=1")).json
        assert ([each["id"] for each in page["data"]], page["has_more"]) == ([batch_id], True)
        page = (await call(gateway, "GET", f"{base}/batches?limit=1&after={page['last_id']}")).json
        assert ([each["id"] for each in page["data"]], page["has_more"]) == ([native_id], False)
        assert page["data"][0]["endpoint"] == "/ai/run"
        events = (await call(gateway, "GET", f"{base}/batches/{batch_id}/events")).json["data"]
        assert [event["type"].rpartition(".")[2] for event in events] == ["queued", "succeeded"]

    @pytest.mark.parametrize(
        ("changes", "field"),
        [
            ({"endpoint": "/v1/images"}, "endpoint"),
            ({"completion_window": "7d"}, "completion_window"),
            ({"input_file_id": "file-none"}, "input_file_id"),
            ({"input_file_id": 7}, "input_file_id"),
            ({"metadata": {str(n): "" for n in range(17)}}, "metadata"),
        ],
    )
    async def test_a_wrong_order_is_refused_by_name(
        self, gateway: Harness, changes: dict[str, Any], field: str
    ) -> None:
        reply = await create(gateway, gateway.root("/v1"), line("a"), **changes)
        assert reply.status == 400
        assert field in message_of(reply)
        assert reply.json["error"]["param"] == field

    async def test_an_account_has_so_many_open(self, gateway: Harness, replicas: list[FakeReplica]) -> None:
        for replica in replicas:
            replica.script = Script(token_delay_s=5.0)
        base = gateway.root("/v1")
        statuses = [(await create(gateway, base, line("a"))).status for _ in range(3)]
        assert statuses == [200, 200, 429]


class TestFiles:
    async def test_a_file_can_be_seen_read_and_deleted(self, gateway: Harness, base: str) -> None:
        content = line("a") + "\n"
        stored = (await upload(gateway, base, content)).json
        assert (stored["object"], stored["purpose"], stored["filename"]) == ("file", "batch", "input.jsonl")
        assert stored["bytes"] == len(content)
        listed = (await call(gateway, "GET", f"{base}/files?purpose=batch")).json
        assert [each["id"] for each in listed["data"]] == [stored["id"]]
        assert (await call(gateway, "GET", f"{base}/files/{stored['id']}")).json == stored
        reply = await call(gateway, "GET", f"{base}/files/{stored['id']}/content")
        assert reply.body == content.encode()
        reply = await call(gateway, "DELETE", f"{base}/files/{stored['id']}")
        assert reply.json == {"id": stored["id"], "object": "file", "deleted": True}
        assert (await call(gateway, "GET", f"{base}/files/{stored['id']}")).status == 404

    async def test_files_are_their_accounts(self, gateway: Harness) -> None:
        base = gateway.root("/v1")
        file_id = (await upload(gateway, base, line("a"))).json["id"]
        for method, path in (("GET", ""), ("GET", "/content"), ("DELETE", "")):
            reply = await call(gateway, method, f"{base}/files/{file_id}{path}", token=OTHER_TOKEN)
            assert reply.status == 404
        assert (await call(gateway, "GET", f"{base}/files", token=None)).status == 401
        assert (await call(gateway, "GET", gateway.url("/v1/files"), token=OTHER_TOKEN)).status == 401

    async def test_what_cannot_be_taken(self, gateway: Harness) -> None:
        base = gateway.root("/v1")
        reply = await upload(gateway, base, "x" * 50_001)
        assert reply.status == 413
        assert (await upload(gateway, base, "x", purpose="fine-tune")).status == 400
        assert (await upload(gateway, base, "x", purpose=None)).status == 400
        assert (await call(gateway, "POST", f"{base}/files", json={})).status == 400
        assert (await upload(gateway, base, "x" * 40_000)).status == 200
        reply = await upload(gateway, base, "x" * 40_000)
        assert reply.status == 429
        assert "60000 bytes" in message_of(reply)
        assert len((await call(gateway, "GET", f"{base}/files")).json["data"]) == 1

    @pytest.mark.parametrize("query", ["limit=0", "limit=x", "limit=100000", "order=asc"])
    async def test_a_wrong_page_is_refused_by_name(self, gateway: Harness, query: str) -> None:
        reply = await call(gateway, "GET", gateway.root(f"/v1/files?{query}"))
        assert reply.status == 400
        assert query.partition("=")[0] in message_of(reply)
