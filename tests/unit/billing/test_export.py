"""Exports: sums to the last nano, ids that stay, and the rules of FOCUS and CloudEvents."""

from __future__ import annotations

import csv
import io
import json
import re
from collections import Counter
from datetime import datetime
from decimal import Decimal
from typing import Any

import msgspec
import pytest
from pyarrow import parquet

from billing.export import EventPosition, ExportedCharge, charges, events
from billing.export_focus import COLUMNS, write_csv, write_parquet
from billing.periods import MICROS_PER_DAY, Period, day_start_us, parse_date
from billing.rates import RateBook
from billing.store import Store
from billing.usage import UsageRecord
from tests.support.ledger import ACCOUNT, KIMI, NOON_US, book, card, record
from tests.unit.billing.test_rollups import varied

MIDNIGHT_US = day_start_us(parse_date("2026-11-30"))
TIME = re.compile(r"\d{4}-\d\d-\d\dT\d\d:00:00Z")


@pytest.fixture
def filled(store: Store, rate_book: RateBook) -> tuple[Store, list[UsageRecord]]:
    made = varied(300, seed=21)
    store.post(made, rate_book)
    return store, made


def exported(store: Store, **options: Any) -> list[ExportedCharge]:
    with store.reading() as connection:
        return list(charges(connection, options.pop("period", Period()), **options))


def csv_rows(store: Store, **options: Any) -> list[dict[str, str]]:
    out = io.StringIO()
    write_csv(exported(store, **options), out, "USD")
    return list(csv.DictReader(io.StringIO(out.getvalue())))


def test_rows_add_up_to_what_was_charged(
    filled: tuple[Store, list[UsageRecord]], rate_book: RateBook
) -> None:
    store, made = filled
    rows = exported(store)
    assert sum(row.amount_nanos for row in rows) == sum(rate_book.price(one).amount_nanos for one in made)
    tokens: Counter[str] = Counter()
    for row in rows:
        tokens[row.token_class] += row.num_tokens
    charged = [one for one in made if one.is_charged]
    assert tokens == {
        "input": sum(one.prompt_tokens - one.cached_prompt_tokens for one in charged),
        "cached_input": sum(one.cached_prompt_tokens for one in charged),
        "output": sum(one.completion_tokens for one in charged),
    }


@pytest.mark.parametrize("width", ["day", "hour"])
def test_ids_are_unique_and_stay(filled: tuple[Store, list[UsageRecord]], width: str) -> None:
    store, _ = filled
    rows = exported(store, width=width)
    assert len({row.id for row in rows}) == len(rows)
    assert exported(store, width=width) == rows
    days = [
        exported(store, period=Period(start, start + MICROS_PER_DAY), width=width)
        for start in range(MIDNIGHT_US - 4 * MICROS_PER_DAY, MIDNIGHT_US + 5 * MICROS_PER_DAY, MICROS_PER_DAY)
    ]
    assert [row for day in days for row in day] == rows


def test_a_price_change_is_a_row_of_its_own(store: Store) -> None:
    prices = book(card(), card(effective_from="2026-11-30", input="0.70"))
    store.post([record(1, started_at_us=MIDNIGHT_US - 1), record(2, started_at_us=MIDNIGHT_US)], prices)
    found = [(row.start_us, row.rate_micros) for row in exported(store) if row.token_class == "input"]
    assert found == [(MIDNIGHT_US - MICROS_PER_DAY, 600_000), (MIDNIGHT_US, 700_000)]


def test_the_free_allocation_is_a_credit(store: Store, rate_book: RateBook) -> None:
    half = record(1)
    neurons = rate_book.price(half).neurons_e4
    store.post([msgspec.structs.replace(half, free_neurons_e4=neurons // 2)], rate_book)
    rows = csv_rows(store)
    assert [row["ChargeCategory"] for row in rows] == ["Usage", "Usage", "Usage", "Credit"]
    assert Decimal(rows[-1]["BilledCost"]) < 0
    costs = ("BilledCost", "EffectiveCost", "ListCost", "ContractedCost")
    assert len({rows[-1][name] for name in costs}) == 1
    without = ("ListUnitPrice", "ContractedUnitPrice", "PricingQuantity", "PricingUnit", "ConsumedQuantity")
    assert not any(rows[-1][name] for name in without)
    with store.reading() as connection:
        charged = connection.exec_driver_sql("SELECT amount_nanos FROM ledger_transactions").scalar_one()
    assert sum(Decimal(row["BilledCost"]) for row in rows) == Decimal(charged) / 10**9


def test_rows_keep_the_rules_of_focus(filled: tuple[Store, list[UsageRecord]]) -> None:
    """Of FOCUS 1.2, those that apply to usage without commitments."""
    store, _ = filled
    rows = csv_rows(store, width="hour")
    assert rows
    never_empty = (
        *("BilledCost", "EffectiveCost", "ListCost", "ContractedCost", "BillingCurrency", "BillingAccountId"),
        *("BillingPeriodStart", "BillingPeriodEnd", "ChargePeriodStart", "ChargePeriodEnd"),
        *("ChargeCategory", "ChargeDescription", "ChargeFrequency", "ServiceCategory", "ServiceName"),
        *("ProviderName", "PublisherName", "InvoiceIssuerName", "PricingUnit", "PricingQuantity"),
        *("SkuId", "SkuPriceId", "ListUnitPrice", "ContractedUnitPrice", "ConsumedQuantity", "ConsumedUnit"),
    )
    for row in rows:
        assert tuple(row) == COLUMNS
        assert all(row[name] for name in never_empty)
        assert all(TIME.fullmatch(row[name]) for name in row if name.endswith(("PeriodStart", "PeriodEnd")))
        assert row["BillingPeriodStart"] <= row["ChargePeriodStart"] < row["ChargePeriodEnd"]
        assert row["ChargePeriodEnd"] <= row["BillingPeriodEnd"]
        assert row["ChargeCategory"] == "Usage"
        assert row["ChargeClass"] == ""
        assert row["ChargeFrequency"] in ("One-Time", "Recurring", "Usage-Based")
        assert row["PricingCategory"] in ("Standard", "Dynamic", "Committed", "Other")
        assert re.fullmatch("[A-Z]{3}", row["BillingCurrency"])
        assert json.loads(row["SkuPriceDetails"]) == {"x_TokenClass": row["x_TokenClass"]}
        assert set(json.loads(row["Tags"])) == {"token_id", "token_name"}
        assert all(re.fullmatch("[A-Z][A-Za-z]*|x_[A-Za-z]+", name) for name in row)
        check_arithmetic(row)


def check_arithmetic(row: dict[str, str]) -> None:
    """List and contracted costs are unit price times quantity; what is billed was rounded by request."""
    slack = Decimal(int(row["x_RequestCount"])) / 10**9
    quantity = Decimal(row["PricingQuantity"])
    assert Decimal(row["ConsumedQuantity"]) == quantity * 1_000_000
    for cost, price in (("ContractedCost", "ContractedUnitPrice"), ("ListCost", "ListUnitPrice")):
        assert Decimal(row[cost]) == quantity * Decimal(row[price])
    assert Decimal(row["BilledCost"]) == Decimal(row["EffectiveCost"])
    assert abs(Decimal(row["BilledCost"]) - Decimal(row["ContractedCost"])) <= slack / 2
    assert Decimal(row["ListCost"]) >= Decimal(row["ContractedCost"])
    assert "E" not in row["BilledCost"]


def test_the_discount_shows_in_the_rows_of_cached_tokens(store: Store, rate_book: RateBook) -> None:
    store.post([record()], rate_book)
    [cached] = [row for row in csv_rows(store) if row["x_TokenClass"] == "cached_input"]
    assert (cached["SkuMeter"], cached["SkuId"]) == ("Cached Input Tokens", KIMI)
    assert Decimal(cached["ListCost"]) == Decimal("0.00048")
    assert Decimal(cached["BilledCost"]) == Decimal("0.00008")


def test_parquet_says_the_same_as_csv(filled: tuple[Store, list[UsageRecord]]) -> None:
    store, _ = filled
    out = io.BytesIO()
    assert write_parquet(exported(store), out, "USD") == len(exported(store))
    table = parquet.read_table(io.BytesIO(out.getvalue()))
    assert table.schema.metadata[b"focus_version"] == b"1.2"
    for row, text in zip(table.to_pylist(), csv_rows(store), strict=True):
        for name in ("BilledCost", "ListCost", "ContractedCost", "ListUnitPrice", "PricingQuantity"):
            assert row[name] == Decimal(text[name])
        assert row["ChargePeriodStart"] == datetime.fromisoformat(text["ChargePeriodStart"])
        assert row["x_RowId"] == text["x_RowId"]
        assert (row["Tags"], row["RegionId"]) == (text["Tags"], None)


def test_events_are_cloudevents_one_for_each_class(filled: tuple[Store, list[UsageRecord]]) -> None:
    store, made = filled
    with store.reading() as connection:
        found = [event for _, group in events(connection, account_id=ACCOUNT) for event in group]
    assert len({(event.source, event.id) for event in found}) == len(found)
    tokens = Counter[str]()
    for event in found:
        assert (event.specversion, event.type, event.subject) == ("1.0", "llm.tokens", ACCOUNT)
        assert datetime.fromisoformat(event.time).tzinfo is not None
        tokens[str(event.data["type"])] += int(event.data["tokens"])
    own = [one for one in made if one.is_charged and one.account_id == ACCOUNT]
    assert tokens["cached_input"] == sum(one.cached_prompt_tokens for one in own)
    assert tokens["output"] == sum(one.completion_tokens for one in own)


def test_events_go_on_behind_any_position(filled: tuple[Store, list[UsageRecord]]) -> None:
    store, _ = filled
    with store.reading() as connection:
        whole = list(events(connection))
        found, after = [], EventPosition()
        while some := list(events(connection, after=after, max_requests=7)):
            found += some
            after = some[-1][0]
        assert found == whole
        assert list(events(connection, posted_before_us=NOON_US)) == []
