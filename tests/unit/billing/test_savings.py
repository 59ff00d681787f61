"""What caching saves, checked with decimals."""

from __future__ import annotations

from decimal import Decimal

import pytest

from billing.analytics import UsageFilter
from billing.config import BillingConfig, BillingConfigError, PriceListConfig
from billing.rates import RateBook
from billing.savings import TokenCounts, price_lists, savings
from billing.savings_example import ASSUMPTIONS, TOKENS_A_DAY, published_case
from billing.store import Store
from tests.support.ledger import ACCOUNT, records


def listed(**changes: str | None) -> PriceListConfig:
    fields = {"name": "Other", "source": "a page", "as_of": "2026-08-28", "input": "1.40", "output": "4.40"}
    return PriceListConfig(**(fields | {"cached_input": "0.26"} | changes))  # type: ignore[arg-type]


def test_recorded_usage_on_another_list(store: Store, rate_book: RateBook) -> None:
    made = records(200, seed=9)
    store.post(made, rate_book)
    charged = [one for one in made if one.is_charged]
    lists = price_lists(BillingConfig(comparisons=[listed(), listed(name="Flat", cached_input=None)]))
    with store.reading() as connection:
        found = savings(connection, UsageFilter(account_id=ACCOUNT), lists)
        failures = savings(connection, UsageFilter(statuses=("error",)), lists)
    cached = sum(one.cached_prompt_tokens for one in charged)
    prompt = sum(one.prompt_tokens for one in charged)
    output = sum(one.completion_tokens for one in charged)
    assert found.tokens == TokenCounts(prompt - cached, cached, output)
    assert found.num_requests == len(charged)
    assert found.amount_nanos == sum(rate_book.price(one).amount_nanos for one in charged)
    assert found.undiscounted_nanos == sum(rate_book.price(one).undiscounted_nanos for one in charged)
    other, flat = found.comparisons
    million = Decimal(1_000_000)
    exact = (
        (prompt - cached) * Decimal("1.40") / million
        + cached * Decimal("0.26") / million
        + output * Decimal("4.40") / million
    )
    assert abs(Decimal(other.amount) - exact) <= Decimal("0.000000002")
    assert abs(
        Decimal(other.uncached) - (prompt * Decimal("1.40") + output * Decimal("4.40")) / million
    ) < Decimal("0.000000002")
    assert flat.amount_nanos == flat.uncached_nanos == other.uncached_nanos
    assert other.saved_nanos == other.amount_nanos - found.amount_nanos
    assert found.computed_factor == prompt / (prompt - cached)
    assert (failures.num_requests, failures.amount, failures.saved_share) == (0, "0.00", 0.0)


def test_the_published_case_comes_out() -> None:
    found = published_case()
    [mid_tier] = found.comparisons
    assert TOKENS_A_DAY.num_tokens == 7_000_000_000
    assert round(mid_tier.amount_nanos / 1e15, 1) == 2.4  # millions
    assert round(100 * mid_tier.saved_share) == 77
    assert len(ASSUMPTIONS) == 3


@pytest.mark.parametrize(
    ("changes", "path"),
    [
        ({"as_of": "August"}, "billing.comparisons[0].as_of"),
        ({"input": "-1"}, "billing.comparisons[0].input"),
        ({"cached_input": "free"}, "billing.comparisons[0].cached_input"),
        ({"source": ""}, "billing.comparisons[0]"),
    ],
)
def test_a_bad_list_is_named(changes: dict[str, str], path: str) -> None:
    with pytest.raises(BillingConfigError) as caught:
        price_lists(BillingConfig(comparisons=[listed(**changes)]))
    assert caught.value.path == path
