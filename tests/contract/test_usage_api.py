"""The usage API, over sockets: what was served comes back, filtered, grouped, a page at a time."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any
from urllib.parse import quote, urlencode

import pytest

from billing.accounts import ALL_PERMISSIONS, AccountDirectory
from billing.money import format_nanos
from billing.rates import RateBook
from billing.usage import UsageRecord
from gateway.config import AnalyticsConfig
from tests.support.gateway_harness import (
    ACCOUNT,
    BILLING,
    MODEL,
    OTHER_ACCOUNT,
    OTHER_TOKEN,
    Harness,
    gateway_config,
    open_books,
)
from tests.support.ledger import NOON_US, record

pytestmark = pytest.mark.each_store

OPERATOR_TOKEN = "token-of-an-operator-0123456789abcdef"
BLIND_TOKEN = "token-that-may-only-run-0123456789ab"
Start = Callable[..., Awaitable[Harness]]


def served(number: int, **changes: Any) -> UsageRecord:
    return record(
        number,
        **{
            "account_id": ACCOUNT,
            "model": MODEL,
            "started_at_us": NOON_US + number * 600_000_000,
            "finished_at_us": NOON_US + number * 600_000_000 + 2_000_000,
            "ttft_us": 100_000 + number * 1_000,
            "status": "error" if number % 10 == 9 else "ok",
        }
        | changes,
    )


@pytest.fixture
def books(data_dir: Path) -> list[UsageRecord]:
    """60 requests of the account over ten hours, one of another."""
    store = open_books(data_dir)
    made = [served(number) for number in range(60)]
    store.post([*made, served(99, account_id=OTHER_ACCOUNT)], RateBook.from_config(BILLING))
    directory = AccountDirectory(store)
    directory.import_token(OTHER_ACCOUNT, OPERATOR_TOKEN, "operator", ALL_PERMISSIONS)
    directory.import_token(ACCOUNT, BLIND_TOKEN, "blind", ["ai:run"])
    store.close()
    return made


async def ask(gateway: Harness, *, as_token: str | None = None, **parameters: str) -> Any:
    options = {} if as_token is None else {"token": as_token}
    reply = await gateway.get(f"/usage?{urlencode(parameters)}", **options)
    assert reply.status == 200, reply.body
    body = reply.json
    assert list(body) == ["result", "success", "errors", "messages", "result_info"]
    assert (body["success"], body["errors"], body["messages"]) == (True, [], [])
    return body


async def test_days_are_the_default(books: list[UsageRecord], gateway: Harness) -> None:
    body = await ask(gateway)
    [day] = body["result"]
    book = RateBook.from_config(BILLING)
    amount = sum(book.price(one).amount_nanos for one in books)
    assert day["day"] == "2026-11-30"
    assert day["num_requests"] == 60
    assert day["prompt_tokens"] == 60_000
    assert day["cached_prompt_tokens"] == 48_000
    assert day["cached_share"] == 0.8
    assert day["amount_nanos"] == amount
    assert day["amount"] == format_nanos(amount)
    assert day["input_nanos"] + day["cached_input_nanos"] + day["output_nanos"] == amount
    assert 120 < day["ttft_ms_p50"] < 140
    assert 24 < day["tokens_per_second_p50"] < 28
    assert body["result_info"] == {
        "limit": 100,
        "currency": "USD",
        "group_by": ["day"],
        "count": 1,
        "cursor": None,
        "since": None,
        "until": None,
    }


async def test_filters_narrow(books: list[UsageRecord], gateway: Harness) -> None:
    [failed] = (await ask(gateway, group_by="none", status="error"))["result"]
    assert (failed["num_requests"], failed["amount"]) == (6, "0.00")
    [some] = (await ask(gateway, group_by="none", session="session-1", model=MODEL))["result"]
    assert some["num_requests"] == 20
    [none] = (await ask(gateway, group_by="none", token="another"))["result"]
    assert none["num_requests"] == 0
    hours = await ask(gateway, group_by="hour", since="2026-11-30T13:10:00Z", until="2026-11-30T15:00:00Z")
    assert [row["hour"] for row in hours["result"]] == ["2026-11-30T13:00:00Z", "2026-11-30T14:00:00Z"]
    assert [row["num_requests"] for row in hours["result"]] == [6, 6]
    assert hours["result_info"]["since"] == "2026-11-30T13:00:00.000000Z"


async def test_pages_make_up_the_whole(books: list[UsageRecord], gateway: Harness) -> None:
    found: list[str] = []
    cursor = ""
    while True:
        body = await ask(gateway, group_by="request", limit="7", cursor=cursor)
        found += [row["request_id"] for row in body["result"]]
        cursor = body["result_info"]["cursor"]
        if not cursor:
            break
        assert body["result_info"]["count"] == 7
    assert found == [one.request_id for one in reversed(books)]
    first = await ask(gateway, group_by="session", limit="2")
    second = await ask(gateway, group_by="session", limit="2", cursor=first["result_info"]["cursor"])
    assert len({row["session"] for row in first["result"] + second["result"]}) == 3
    amounts = [row["amount_nanos"] for row in first["result"] + second["result"]]
    assert amounts == sorted(amounts, reverse=True)


async def test_a_cursor_belongs_to_its_question(books: list[UsageRecord], gateway: Harness) -> None:
    asked = {"group_by": "request", "limit": "2", "since": "2026-11-01"}
    cursor = (await ask(gateway, **asked))["result_info"]["cursor"]
    assert (await ask(gateway, **asked | {"limit": "9"}, cursor=cursor))["result_info"]["count"] == 9
    for other in ({"group_by": "model"}, {"group_by": "none"}, {"status": "ok"}, {"since": "2026-11-02"}):
        query = urlencode(asked | other | {"cursor": cursor})
        reply = await gateway.get(f"/usage?{query}")
        assert reply.status == 400, other
        assert "'cursor'" in reply.json["errors"][0]["message"]


async def test_groups_may_be_combined(books: list[UsageRecord], gateway: Harness) -> None:
    body = await ask(gateway, group_by="day,session,status")
    assert len(body["result"]) == 6
    assert sum(row["num_requests"] for row in body["result"]) == 60
    assert "ttft_ms_p50" not in body["result"][0]


@pytest.mark.parametrize(
    ("query", "pointer"),
    [
        ("group_by=week", "group_by"),
        ("group_by=day,hour", "group_by"),
        ("group_by=model,model", "group_by"),
        ("group_by=session,quarter", "group_by"),
        ("status=fine", "status"),
        ("since=yesterday", "since"),
        ("since=99999999w", "since"),
        ("since=2026-11-02&until=2026-11-01", "until"),
        ("limit=0", "limit"),
        ("limit=1001", "limit"),
        ("limit=1&limit=2", "limit"),
        ("cursor=nonsense", "cursor"),
        (f"cursor={quote('WzEsMiwzLDRd')}", "cursor"),
        ("group_by=request&cursor=WyJhIl0=", "cursor"),
        ("group_by=request&order=amount", "order"),
        ("order=random", "order"),
        ("model=a%00b", "model"),
        ("colour=red", "colour"),
    ],
)
async def test_a_wrong_parameter_is_named(gateway: Harness, query: str, pointer: str) -> None:
    reply = await gateway.get(f"/usage?{query}")
    assert reply.status == 400, reply.body
    assert f"'{pointer}'" in reply.json["errors"][0]["message"]


async def test_who_may_read(books: list[UsageRecord], gateway: Harness) -> None:
    assert (await gateway.get("/usage", token=None)).status == 401
    assert (await gateway.get("/usage", token=OTHER_TOKEN)).status == 401
    assert (await gateway.get("/usage", token=BLIND_TOKEN)).status == 403
    body = await ask(gateway, as_token=OPERATOR_TOKEN, group_by="none")
    assert body["result"][0]["num_requests"] == 60
    assert (await gateway.get("/usage", token="x" * 40)).status == 401


async def test_what_is_served_is_there_within_a_moment(gateway: Harness) -> None:
    reply = await gateway.chat(headers={"x-session-affinity": "ses_now"})
    assert reply.status == 200
    for _ in range(100):
        [row] = (await ask(gateway, group_by="none", session="ses_now"))["result"]
        if row["num_requests"]:
            break
        await asyncio.sleep(0.02)
    usage = reply.json["usage"]
    assert row["prompt_tokens"] == usage["prompt_tokens"]
    assert row["cached_prompt_tokens"] == usage["prompt_tokens_details"]["cached_tokens"]


async def test_questions_are_bounded(books: list[UsageRecord], start_gateway: Start) -> None:
    config = gateway_config(analytics=AnalyticsConfig(max_concurrent_reads=1, max_waiting_reads=1))
    gateway = await start_gateway(config)
    replies = await asyncio.gather(*(gateway.get("/usage?group_by=request") for _ in range(12)))
    statuses = sorted(reply.status for reply in replies)
    assert statuses[0] == 200
    assert statuses[-1] == 429
    refused = next(reply for reply in replies if reply.status == 429)
    assert refused.headers["retry-after"] == "1"
    assert (await gateway.get("/usage")).status == 200
