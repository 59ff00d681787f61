"""Books that make the dashboard worth looking at: two weeks of two accounts, the same every time."""

from __future__ import annotations

import math
import random
from pathlib import Path

import msgspec

from billing.accounts import ALL_PERMISSIONS, AccountDirectory
from billing.budgets import BudgetBook
from billing.config import BillingConfig, PriceListConfig
from billing.rates import RateBook
from billing.store import Store
from billing.usage import UsageRecord, new_request_id
from tests.support.gateway_harness import ACCOUNT, BILLING, MODEL, OTHER_ACCOUNT

OPERATOR_TOKEN = "token-of-an-operator-0123456789abcdef"
SECOND_MODEL = "@cf/zai-org/glm-4.7-flash"
MICROS_PER_HOUR = 3_600_000_000
AGENTS = ("code-review", "security-review", "triage", "docs", "release-notes")


def fill(data_dir: Path, now_us: int, *, num_days: int = 14, seed: int = 11) -> BillingConfig:
    """Post usage up to ``now_us``; returns the prices that it was posted with."""
    config = billing_config()
    store = Store.open(config.database_url_in(data_dir))
    directory = AccountDirectory(store)
    directory.import_token(OTHER_ACCOUNT, OPERATOR_TOKEN, "operator", ALL_PERMISSIONS)
    tokens = {
        account: [token.id for token in directory.list_tokens(account)]
        for account in (ACCOUNT, OTHER_ACCOUNT)
    }
    draw = random.Random(seed)
    made = [
        _request(draw, now_us, start_us, tokens)
        for start_us in range(
            now_us - num_days * 24 * MICROS_PER_HOUR, now_us - MICROS_PER_HOUR, MICROS_PER_HOUR
        )
        for _ in range(_num_requests(draw, start_us))
    ]
    book = RateBook.from_config(config)
    for start in range(0, len(made), 500):
        store.post(made[start : start + 500], book)
    budgets = BudgetBook(store)
    spent = sum(book.price(one).amount_nanos for one in made if one.account_id == ACCOUNT)
    budgets.set_budget(ACCOUNT, "monthly", spent * 13 // 10)
    budgets.set_budget(ACCOUNT, "daily", max(spent // 12, 1), action="warn")
    store.close()
    return config


def billing_config() -> BillingConfig:
    cards = [
        *BILLING.rate_cards,
        msgspec.structs.replace(
            BILLING.rate_cards[0], model=SECOND_MODEL, input="0.06", cached_input=None, output="0.40"
        ),
    ]
    lists = [
        PriceListConfig(
            name="GLM 5.3 on Workers AI",
            source="developers.cloudflare.com/workers-ai/platform/pricing",
            as_of="2026-08-28",
            input="1.40",
            cached_input="0.26",
            output="4.40",
        ),
        PriceListConfig(
            name="a mid-tier proprietary model",
            source="assumed",
            as_of="2026-03-19",
            input="3.00",
            cached_input="0.30",
            output="15.00",
        ),
    ]
    return msgspec.structs.replace(BILLING, rate_cards=cards, comparisons=lists)


def _num_requests(draw: random.Random, start_us: int) -> int:
    """More by day than by night."""
    hour = start_us // MICROS_PER_HOUR % 24
    return draw.randrange(1, 3 + int(9 * max(math.sin((hour - 6) / 24 * 2 * math.pi), 0)))


def _request(draw: random.Random, now_us: int, start_us: int, tokens: dict[str, list[str]]) -> UsageRecord:
    account = ACCOUNT if draw.random() < 0.8 else OTHER_ACCOUNT
    started = start_us + draw.randrange(MICROS_PER_HOUR)
    agent = draw.choice(AGENTS)
    prompt = int(draw.lognormvariate(9.6, 0.7))
    completion = int(draw.lognormvariate(5.6, 0.8)) + 2
    cached = int(prompt * min(max(draw.gauss(0.82, 0.12), 0.0), 0.98)) // 16 * 16
    is_second = draw.random() < 0.2
    status = draw.choices(("ok", "client_disconnected", "timeout", "replica_lost"), (95, 3, 1, 1))[0]
    ttft = int(draw.lognormvariate(12.6, 0.5)) + (prompt - cached) * 25
    return UsageRecord(
        request_id=new_request_id(started),
        account_id=account,
        token_id=draw.choice(tokens[account]),
        model=SECOND_MODEL if is_second else MODEL,
        requested_model=MODEL,
        surface=draw.choice(("run", "v1", "v1", "binding")),
        replica_id=f"replica-{draw.randrange(2)}",
        session=f"{agent}-{start_us // (6 * MICROS_PER_HOUR) % 97:02d}" if draw.random() < 0.93 else "",
        started_at_us=started,
        finished_at_us=started + ttft + completion * int(draw.gauss(22_000, 4_000)),
        prompt_tokens=prompt,
        cached_prompt_tokens=0 if is_second and draw.random() < 0.5 else cached,
        completion_tokens=completion,
        reasoning_tokens=completion // 3 if draw.random() < 0.3 else 0,
        status=status,
        ttft_us=ttft,
    )
