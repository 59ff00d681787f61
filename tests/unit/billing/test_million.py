"""Random records through price, ledger, sums and statement: equal to an independent computation in decimals.

The suite takes a sample; ``make test-billing-million`` takes a million.
"""

from __future__ import annotations

import os
import random
from collections import Counter
from collections.abc import Iterator
from decimal import ROUND_HALF_EVEN, Decimal
from typing import Any

import pytest
from sqlalchemy import select

from billing.audit import audit
from billing.config import BatchPricesConfig, BillingConfig, RateCardConfig
from billing.credits import CreditBook
from billing.periods import day_start_us, parse_date
from billing.rates import RateBook
from billing.reports import balance_nanos
from billing.rollups import ROLLUPS
from billing.statement import monthly_statement
from billing.store import Store
from billing.usage import UsageRecord
from tests.support.ledger import ACCOUNT, OTHER_ACCOUNT

NUM_RECORDS = int(os.environ.get("EMBERGATE_NUM_RECORDS", "4000"))
GROUP = 500 if NUM_RECORDS < 100_000 else 5_000
"""Records posted in one transaction."""

DAY_US = 86_400_000_000
FIRST_DAY = parse_date("2026-10-20")
NUM_DAYS = 60
MODELS = ("m-cheap", "m-dear", "m-plain")
ACCOUNTS = (ACCOUNT, OTHER_ACCOUNT)
CHARGED = ("ok", "client_disconnected")

CARDS = [
    RateCardConfig(
        model="m-cheap", effective_from="2026-01-01", input="0.05", cached_input="0.01", output="0.20",
        batch=BatchPricesConfig(input="0.025", cached_input="0.005", output="0.1"),
    ),
    RateCardConfig(
        model="m-cheap", effective_from="2026-11-15", input="0.061", cached_input="0.0123", output="0.2",
    ),
    RateCardConfig(
        model="m-dear", effective_from="2026-01-01", input="14.999999", cached_input="1.5", output="75",
    ),
    RateCardConfig(
        model="m-dear", effective_from="2026-11-01", effective_until="2026-12-01", account=ACCOUNT,
        input="9.000001", cached_input="0.9", output="45.5",
    ),
    RateCardConfig(model="m-plain", effective_from="2026-01-01", input="0.6", output="3.000003"),
]  # fmt: skip


def random_records(count: int, seed: int) -> Iterator[UsageRecord]:
    draw = random.Random(seed)
    start_us = day_start_us(FIRST_DAY)
    for number in range(count):
        prompt = draw.choice([0, 1, 17, draw.randrange(300_000)])
        at_us = start_us + draw.choice([0, DAY_US - 1, draw.randrange(DAY_US)])
        at_us += draw.randrange(NUM_DAYS) * DAY_US
        yield UsageRecord(
            request_id=f"{number:09d}",
            account_id=draw.choice(ACCOUNTS),
            token_id=f"token-{draw.randrange(3)}",
            model=draw.choice(MODELS),
            requested_model="any",
            surface=draw.choice(["run", "v1", "binding", "batch"]),
            session=f"session-{draw.randrange(50)}",
            started_at_us=at_us,
            finished_at_us=at_us + draw.randrange(10_000_000),
            prompt_tokens=prompt,
            cached_prompt_tokens=draw.choice([0, prompt, draw.randint(0, prompt)]),
            completion_tokens=draw.randrange(20_000),
            status=draw.choice(["ok", "ok", "ok", "client_disconnected", "replica_lost", "timeout", "error"]),
            is_estimated=draw.random() < 0.05,
            free_neurons_e4=draw.choice([0, 0, 0, draw.randrange(3_000_000)]),
        )


class Expected:
    """What the books should hold, from decimals of dollars and nothing of the code under test."""

    def __init__(self) -> None:
        self.by_day: Counter[tuple[str, str, int]] = Counter()
        self.by_month: Counter[tuple[str, str]] = Counter()
        self.lines: Counter[tuple[str, str, str, str]] = Counter()
        self.neurons: Counter[tuple[str, str]] = Counter()
        self.counts: Counter[tuple[str, str]] = Counter()

    def add(self, record: UsageRecord) -> None:
        day = (record.started_at_us - day_start_us(FIRST_DAY)) // DAY_US
        month = "2026-10" if day < 12 else "2026-11" if day < 42 else "2026-12"
        self.counts[record.account_id, month] += 1
        if record.status not in CHARGED:
            return
        prices = _prices(record, day)
        tokens = (
            record.prompt_tokens - record.cached_prompt_tokens,
            record.cached_prompt_tokens,
            record.completion_tokens,
        )
        amounts = [
            _nanos(Decimal(count) * price / 1_000_000) for count, price in zip(tokens, prices, strict=True)
        ]
        neurons = sum(
            count * _whole(price / Decimal("0.011") * 1_000)
            for count, price in zip(tokens, prices, strict=True)
        )
        neurons_e4 = _whole(Decimal(neurons) / 100)
        free = 0
        if record.free_neurons_e4:
            share = min(Decimal(record.free_neurons_e4), Decimal(neurons_e4))
            free = _whole(Decimal(sum(amounts)) * share / neurons_e4) if neurons_e4 else sum(amounts)
        total = sum(amounts) - free
        self.by_day[record.account_id, record.model, day] += total
        self.by_month[record.account_id, month] += total
        self.neurons[record.account_id, month] += neurons_e4
        classes = ("input", "cached_input", "output", "free_allocation")
        for name, nanos in zip(classes, (*amounts, -free), strict=True):
            self.lines[record.account_id, month, record.model, name] += nanos


def _prices(record: UsageRecord, day: int) -> tuple[Decimal, Decimal, Decimal]:
    """Dollars per million tokens, as the price list above reads to a person."""
    if record.model == "m-plain":
        texts = ("0.6", "0.6", "3.000003")
    elif record.model == "m-dear":
        is_own = record.account_id == ACCOUNT and 12 <= day < 42
        texts = ("9.000001", "0.9", "45.5") if is_own else ("14.999999", "1.5", "75")
    elif day >= 26:
        texts = ("0.061", "0.0123", "0.2")
    else:
        texts = ("0.025", "0.005", "0.1") if record.surface == "batch" else ("0.05", "0.01", "0.20")
    return Decimal(texts[0]), Decimal(texts[1]), Decimal(texts[2])


def _nanos(dollars: Decimal) -> int:
    return int(dollars.quantize(Decimal("1e-9"), rounding=ROUND_HALF_EVEN).scaleb(9))


def _whole(value: Decimal) -> int:
    return int(value.quantize(Decimal(1), rounding=ROUND_HALF_EVEN))


def sums_in(store: Store) -> dict[str, list[Any]]:
    with store.reading() as connection:
        return {
            table.name: [tuple(row) for row in connection.execute(select(table).order_by(*table.primary_key))]
            for table in ROLLUPS
        }


@pytest.mark.timeout(3_600)
@pytest.mark.slow
def test_price_ledger_sums_and_statement_equal_decimals(store: Store) -> None:
    rate_book = RateBook.from_config(BillingConfig(rate_cards=CARDS))
    expected = Expected()
    batch: list[UsageRecord] = []
    for record in random_records(NUM_RECORDS, seed=2026):
        expected.add(record)
        batch.append(record)
        if len(batch) == GROUP:
            store.post(batch, rate_book)
            batch = []
    store.post(batch, rate_book)
    CreditBook(store).top_up(ACCOUNT, 5_000_000_000, "Card")

    _check_statements(store, expected)
    _check_days(store, expected)
    paid_in = 5_000_000_000
    spent = sum(nanos for (account, _), nanos in expected.by_month.items() if account == ACCOUNT)
    assert balance_nanos(store, ACCOUNT) == spent - paid_in
    incremental = sums_in(store)
    assert store.rebuild_rollups() == NUM_RECORDS
    assert sums_in(store) == incremental
    report = audit(store, rate_book, max_receipts=None)
    assert report.is_clean, report.findings[:3]
    assert report.amount_nanos == sum(expected.by_month.values())


def _check_statements(store: Store, expected: Expected) -> None:
    for account in ACCOUNTS:
        for month in ("2026-10", "2026-11", "2026-12"):
            bill = monthly_statement(store, account, month)
            assert bill.amount_nanos == expected.by_month[account, month]
            assert bill.num_requests == expected.counts[account, month]
            assert round(bill.neurons * 10_000) == expected.neurons[account, month]
            lines: Counter[tuple[str, str]] = Counter()
            for line in bill.lines:
                lines[line.model, line.token_class] += line.amount_nanos
            for model in MODELS:
                for token_class in ("input", "cached_input", "output", "free_allocation"):
                    assert lines[model, token_class] == expected.lines[account, month, model, token_class]


def _check_days(store: Store, expected: Expected) -> None:
    found: Counter[tuple[str, str, int]] = Counter()
    table = next(table for table in ROLLUPS if table.name == "rollup_days")
    with store.reading() as connection:
        for row in connection.execute(select(table)):
            day = (row.start_us - day_start_us(FIRST_DAY)) // DAY_US
            found[row.account_id, row.model, day] += row.amount_nanos
    assert +found == +expected.by_day
