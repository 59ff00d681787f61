"""Budgets over sockets: never overshot by more than stated, however many requests come at once."""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any

import pytest

from billing.accounts import AccountDirectory
from billing.budgets import Budget, BudgetBook
from billing.credits import CreditBook
from billing.rates import RateBook
from gateway.config import BudgetsConfig, LimitsConfig, RateLimits
from tests.support.fake_replica import FakeReplica
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

pytestmark = pytest.mark.each_store

CHAT = "/v1/chat/completions"
CHARGE_NANOS = 8 * 600 + 4 * 100 + 3 * 3_000
"""Of one answer of the scripted replica: 8 prompt tokens, 4 cached ones, 3 generated."""
MAX_TOKENS = 10
ESTIMATE_NANOS = 62_000
"""At most what is reserved for one request here: about 50 prompt tokens by size, and 10 generated ones."""

StartGateway = Callable[..., Awaitable[Harness]]
SetBudget = Callable[..., Budget]


@pytest.fixture
def set_budget(data_dir: Path) -> SetBudget:
    def set_(limit_nanos: int, period: Any = "daily", account_id: str = ACCOUNT, **options: Any) -> Budget:
        store = open_books(data_dir)
        try:
            return BudgetBook(store).set_budget(account_id, period, limit_nanos, **options)
        finally:
            store.close()

    return set_


def plenty(**changes: Any) -> Any:
    return gateway_config(
        limits=LimitsConfig(default=RateLimits(requests_per_minute=100_000, max_concurrent_requests=1_000)),
        budgets=BudgetsConfig(refresh_s=0.05),
        **changes,
    )


def charged(harness: Harness) -> int:
    rates = RateBook.from_config(BILLING)
    return sum(rates.price(record).amount_nanos for record in harness.records())


async def changed_from(status: int, gateway: Harness, **fields: Any) -> None:
    """Ask again and again until the answer has another status."""
    async with asyncio.timeout(5):
        reply = await gateway.chat(**fields)
        while reply.status == status:
            reply = await gateway.chat(**fields)


@pytest.mark.slow
async def test_200_at_once_on_a_nearly_spent_budget_do_not_overshoot_it(
    start_gateway: StartGateway, set_budget: SetBudget, replicas: list[FakeReplica]
) -> None:
    limit = 20 * ESTIMATE_NANOS
    set_budget(limit)
    gateway = await start_gateway(plenty())
    for replica in replicas:
        replica.script.token_delay_s = 0.05
    replies = await asyncio.gather(
        *(gateway.chat(stream=number % 2 == 0, max_tokens=MAX_TOKENS) for number in range(200))
    )
    statuses = Counter(reply.status for reply in replies)
    assert set(statuses) == {200, 429}
    assert 20 <= statuses[200] <= 30
    assert {reply.json["errors"][0]["code"] for reply in replies if reply.status == 429} == {3036}

    for replica in replicas:
        replica.script.token_delay_s = 0
    answered = statuses[200]
    while (await gateway.chat(max_tokens=MAX_TOKENS)).status == 200:
        answered += 1
    await gateway.stop()
    assert charged(gateway) == answered * CHARGE_NANOS <= limit
    assert limit - charged(gateway) < ESTIMATE_NANOS  # all of it could be used


async def test_overshoots_only_by_what_prompts_cost_beyond_their_estimate(
    start_gateway: StartGateway, set_budget: SetBudget, replicas: list[FakeReplica]
) -> None:
    limit = 20 * ESTIMATE_NANOS
    set_budget(limit)
    for replica in replicas:  # a hundred times what the size of the body lets one expect
        replica.script.prompt_tokens, replica.script.cached_tokens = 4_000, 0
        replica.script.token_delay_s = 0.05
    gateway = await start_gateway(plenty())
    replies = await asyncio.gather(*(gateway.chat(max_tokens=MAX_TOKENS) for _ in range(200)))
    num_admitted = sum(reply.status == 200 for reply in replies)
    assert 20 <= num_admitted <= 30
    assert (await gateway.chat(max_tokens=MAX_TOKENS)).status == 429
    await gateway.stop()
    cost_of_prompt = 4_000 * 600
    assert limit < charged(gateway) <= limit + num_admitted * cost_of_prompt


async def test_the_refusal_names_the_budget_and_when_it_is_renewed(
    start_gateway: StartGateway, set_budget: SetBudget, replicas: list[FakeReplica]
) -> None:
    set_budget(1_000, "monthly")
    gateway = await start_gateway(plenty())
    for path in (CHAT, f"/run/{MODEL}"):
        reply = await gateway.chat(path=path, max_tokens=MAX_TOKENS)
        assert reply.status == 429
        error = reply.json["errors"][0]
        assert error["code"] == 3036
        assert "beyond the monthly budget of the account (0.000001); it is renewed at " in error["message"]
        assert reply.headers["x-should-retry"] == "false"
        assert int(reply.headers["retry-after"]) > 0
    plain = await gateway.post(
        gateway.root(CHAT), {"model": MODEL, "messages": [{"role": "user", "content": "hi"}]}
    )
    assert plain.status == 429
    assert plain.json["error"]["code"] == "insufficient_quota"
    assert not any(replica.requests for replica in replicas)


async def test_a_budget_is_a_matter_of_its_account_alone(
    start_gateway: StartGateway, set_budget: SetBudget
) -> None:
    set_budget(0)
    gateway = await start_gateway(plenty())
    other = gateway.root(f"/client/v4/accounts/{OTHER_ACCOUNT}/ai{CHAT}")
    body = {"model": MODEL, "messages": [{"role": "user", "content": "hi"}]}
    assert (await gateway.post(other, body, token=OTHER_TOKEN)).status == 200
    assert (await gateway.chat()).status == 429


async def test_a_token_s_budget_leaves_the_other_tokens_alone(
    start_gateway: StartGateway, set_budget: SetBudget, data_dir: Path
) -> None:
    store = open_books(data_dir)
    token, secret = AccountDirectory(store).issue_token(ACCOUNT, "limited")
    store.close()
    set_budget(0, token_id=token.id)
    gateway = await start_gateway(plenty())
    assert (await gateway.chat()).status == 200
    reply = await gateway.chat(token=secret)
    assert reply.status == 429
    assert "daily budget of the API token" in reply.json["errors"][0]["message"]


async def test_a_failure_gives_the_reservation_back(
    start_gateway: StartGateway, set_budget: SetBudget, replicas: list[FakeReplica]
) -> None:
    set_budget(ESTIMATE_NANOS)
    gateway = await start_gateway(plenty())
    for replica in replicas:
        replica.script.status = 500
    assert (await gateway.chat(max_tokens=MAX_TOKENS)).status == 503
    for replica in replicas:
        replica.script.status = 200
    assert (await gateway.chat(max_tokens=MAX_TOKENS)).status == 200


async def test_a_warning_lets_requests_through(
    start_gateway: StartGateway, set_budget: SetBudget, caplog: pytest.LogCaptureFixture
) -> None:
    set_budget(0, action="warn")
    gateway = await start_gateway(plenty())
    assert [(await gateway.chat()).status for _ in range(3)] == [200, 200, 200]
    assert sum("is spent; requests go on" in line for line in caplog.messages) == 1


async def test_what_was_spent_is_known_after_a_restart(
    start_gateway: StartGateway, set_budget: SetBudget
) -> None:
    """BR-23: the committed ledger plus what is pending, each exactly once."""
    set_budget(ESTIMATE_NANOS + CHARGE_NANOS)
    first = await start_gateway(plenty())
    assert (await first.chat(max_tokens=MAX_TOKENS)).status == 200
    await first.stop()
    second = await start_gateway(plenty())
    assert (await second.chat(max_tokens=MAX_TOKENS)).status == 200
    assert (await second.chat(max_tokens=MAX_TOKENS)).status == 429


async def test_prepaid_credit_ends_and_a_top_up_renews_it(
    start_gateway: StartGateway, set_budget: SetBudget, data_dir: Path
) -> None:
    set_budget(0, "credit")
    gateway = await start_gateway(plenty())
    reply = await gateway.chat(max_tokens=MAX_TOKENS)
    assert "it is renewed when the account is topped up" in reply.json["errors"][0]["message"]
    assert "retry-after" not in reply.headers
    store = open_books(data_dir)
    CreditBook(store).top_up(ACCOUNT, ESTIMATE_NANOS, "Card")
    store.close()
    await changed_from(429, gateway, max_tokens=MAX_TOKENS)


async def test_a_budget_that_is_set_or_lifted_meanwhile_holds_soon(
    start_gateway: StartGateway, set_budget: SetBudget, data_dir: Path
) -> None:
    gateway = await start_gateway(plenty())
    assert (await gateway.chat()).status == 200
    budget = set_budget(0)
    await changed_from(200, gateway)
    store = open_books(data_dir)
    BudgetBook(store).remove(budget.id)
    store.close()
    await changed_from(429, gateway)
