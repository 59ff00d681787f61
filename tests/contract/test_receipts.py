"""Receipts over HTTP: for whom, of what, signed with which key."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest

from billing.receipt_keys import read_key_set
from billing.receipts import verify
from tests.support.fake_replica import FakeReplica
from tests.support.gateway_harness import MODEL, OTHER_ACCOUNT, OTHER_TOKEN, Harness, Reply

pytestmark = pytest.mark.each_store

KEYS = "/.well-known/jwks.json"


async def receipt_of(gateway: Harness, answer: Reply, **options: Any) -> Reply:
    """The receipt, once the record is on the books."""
    path = f"/usage/{answer.headers['cf-ai-req-id']}"
    async with asyncio.timeout(5):
        reply = await gateway.get(path, **options)
        while reply.status == 404:
            reply = await gateway.get(path, **options)
    return reply


async def test_the_receipt_of_an_answer_holds_and_says_what_the_answer_did(gateway: Harness) -> None:
    answer = await gateway.chat(path=f"/run/{MODEL}", headers={"x-session-affinity": "ses_1"})
    reply = await receipt_of(gateway, answer)
    keys = await gateway.get(gateway.root(KEYS), token=None)
    receipt, problems = verify(reply.json, read_key_set(keys.json))
    assert problems == []
    usage = answer.json["result"]["usage"]
    assert receipt.prompt_tokens == usage["prompt_tokens"]
    assert receipt.cached_prompt_tokens == usage["prompt_tokens_details"]["cached_tokens"]
    assert receipt.completion_tokens == usage["completion_tokens"]
    assert receipt.neurons_e4 == round(usage["neurons"] * 10_000)
    assert receipt.replica_id == answer.headers["x-embergate-replica"]
    assert (receipt.model, receipt.surface, receipt.session) == (MODEL, "run", "ses_1")


async def test_the_blocks_that_a_replica_names_stand_on_the_receipt(
    gateway: Harness, replicas: list[FakeReplica]
) -> None:
    for replica in replicas:
        replica.script.prompt_tokens, replica.script.cached_tokens = 40, 32
        replica.script.cached_head = "ab" * 32
    for is_stream in (False, True):
        answer = await gateway.chat(stream=is_stream)
        assert b"cached_blocks" not in answer.body
        cache = (await receipt_of(gateway, answer)).json["result"]["receipt"]["cache"]
        assert (cache["num_blocks"], cache["block_size"], cache["head"]) == (2, 16, "ab" * 32)


async def test_it_is_for_its_account_alone(gateway: Harness) -> None:
    answer = await gateway.chat()
    path = f"/usage/{answer.headers['cf-ai-req-id']}"
    await receipt_of(gateway, answer)
    assert (await gateway.get(path, token=None)).status == 401
    assert (await gateway.get(path, token=OTHER_TOKEN)).status == 401
    theirs = gateway.root(f"/client/v4/accounts/{OTHER_ACCOUNT}/ai{path}")
    assert (await gateway.get(theirs, token=OTHER_TOKEN)).status == 404


async def test_what_is_not_on_the_books_is_not_found(gateway: Harness) -> None:
    for request_id in ("never", "x" * 1_000):
        reply = await gateway.get(f"/usage/{request_id}")
        assert reply.status == 404
        assert reply.json["errors"][0]["code"] == 7404


async def test_a_refused_request_has_none(gateway: Harness) -> None:
    answer = await gateway.chat(temperature="warm")
    assert answer.status == 400
    assert (await gateway.get(f"/usage/{answer.headers['cf-ai-req-id']}")).status == 404
