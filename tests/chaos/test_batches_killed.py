"""Ten random ``kill -9``s of gateways and replicas while a batch runs: nothing lost, nothing billed twice."""

from __future__ import annotations

import asyncio
import io
import json
import os
import random
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import aiohttp
import pytest
from sqlalchemy import select

from billing import schema
from billing.audit import audit
from billing.rates import RateBook
from billing.store import Store
from tests.support.fleet import Fleet
from tests.support.gateway_harness import MODEL, TOKEN

pytestmark = [pytest.mark.chaos, pytest.mark.slow]

NUM_ITEMS = int(os.environ.get("CHAOS_BATCH_ITEMS", "300"))
"""The suite makes do with few items that take long; 2,000 were run as well, and can be again."""

NUM_KILLS = 10
NUM_AT_ONCE = 32
TOKEN_DELAY_S = 15.0 * NUM_AT_ONCE / (3 * NUM_ITEMS)
"""So that the batch outlasts the killing."""

BATCHES = {"lease_s": 3.0, "sweep_interval_s": 0.5, "retry_initial_s": 0.2, "poll_interval_s": 0.2}


@pytest.fixture
def fleet(tmp_path: Path) -> Iterator[Fleet]:
    fleet = Fleet(tmp_path, num_gateways=2, num_replicas=2, token_delay_s=TOKEN_DELAY_S, batches=BATCHES)
    fleet.start()
    yield fleet
    fleet.stop()


async def post(session: aiohttp.ClientSession, url: str, body: Any) -> Any:
    headers = {"authorization": f"Bearer {TOKEN}"}
    data = io.BytesIO(json.dumps(body).encode())
    async with session.post(url, data=data, headers=headers, timeout=aiohttp.ClientTimeout(10)) as response:
        answer = await response.json()
        assert response.status == 200, answer
        return answer["result"]


async def ask_anyone(session: aiohttp.ClientSession, fleet: Fleet, path: str, body: Any) -> Any:
    """Ask the gateways in turn until one of them answers."""
    async with asyncio.timeout(30):
        while True:
            for gateway in fleet.gateways:
                try:
                    return await post(session, fleet.url(gateway) + path, body)
                except (aiohttp.ClientError, TimeoutError):
                    await asyncio.sleep(0.05)


async def maltreat(fleet: Fleet, draw: random.Random) -> Counter[str]:
    """Kill one process after another, at random; each comes back a moment later."""
    killed: Counter[str] = Counter()
    victims = [*fleet.gateways, *fleet.replicas]
    for number in range(NUM_KILLS):
        await asyncio.sleep(draw.uniform(0.2, 1.2))
        victim = victims[number % 4] if number < 4 else draw.choice(victims)
        fleet.kill(victim)
        killed[victim] += 1
        await asyncio.sleep(draw.uniform(0.0, 0.5))
        fleet.restart(victim)
    return killed


async def result_of(session: aiohttp.ClientSession, fleet: Fleet, request_id: str) -> Any:
    async with asyncio.timeout(150):
        while True:
            result = await ask_anyone(session, fleet, f"/run/{MODEL}", {"request_id": request_id})
            if "status" not in result:
                return result
            await asyncio.sleep(0.5)


async def test_a_batch_survives_ten_kills(fleet: Fleet) -> None:
    draw = random.Random(20261130)
    requests = [
        {
            "messages": [
                {"role": "system", "content": f"You are reviewer {number % 7}. " * 20},
                {"role": "user", "content": f"file {number}"},
            ],
            "external_reference": f"ref-{number}",
        }
        for number in range(NUM_ITEMS)
    ]
    async with aiohttp.ClientSession() as session:
        path = f"/run/{MODEL}?queueRequest=true"
        request_id = (await ask_anyone(session, fleet, path, {"requests": requests}))["request_id"]
        killing = asyncio.create_task(maltreat(fleet, draw))
        result = await result_of(session, fleet, request_id)
        assert killing.done(), "the batch was over before the killing was: make its items slower"
        assert killing.result().total() == NUM_KILLS
    assert [item["id"] for item in result["responses"]] == list(range(NUM_ITEMS))
    assert [item for item in result["responses"] if not item["success"]] == [], fleet.logs()
    references = [item["external_reference"] for item in result["responses"]]
    assert references == [f"ref-{number}" for number in range(NUM_ITEMS)]
    await asyncio.to_thread(fleet.stop)
    assert_books_are_right(fleet, result)


def assert_books_are_right(fleet: Fleet, result: Any) -> None:
    """One record for each item, with the figures that its result has, and a clean audit."""
    store = Store.open(fleet.database_url)
    try:
        with store.reading() as connection:
            rows = connection.execute(select(schema.usage_records)).all()
        assert len(rows) == NUM_ITEMS
        assert {(row.surface, row.status) for row in rows} == {("batch", "ok")}
        by_id = {f"chatcmpl-{row.request_id}": row for row in rows}
        for item in result["responses"]:
            usage, row = item["result"]["usage"], by_id[item["result"]["id"]]
            assert (usage["prompt_tokens"], usage["completion_tokens"]) == (
                row.prompt_tokens,
                row.completion_tokens,
            )
        for spool_dir in fleet.spool_dirs:
            report = audit(
                store, RateBook.from_config(fleet.billing), spool_directory=spool_dir, in_flight_grace_s=0
            )
            assert report.findings == []
    finally:
        store.close()
