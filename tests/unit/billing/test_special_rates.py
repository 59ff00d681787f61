"""Batch prices, prices of single accounts, and free allocations."""

from __future__ import annotations

from fractions import Fraction
from typing import Any

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from billing.config import (
    AccountBillingConfig,
    BatchPricesConfig,
    BillingConfig,
    BillingConfigError,
    RateCardConfig,
)
from billing.periods import day_start_us, parse_date
from billing.rates import RateBook, rates_of_version
from tests.support.ledger import ACCOUNT, KIMI, OTHER_ACCOUNT, book, card, record

HALF = BatchPricesConfig(input="0.30", cached_input="0.05", output="1.50")


def at(text: str) -> int:
    return day_start_us(parse_date(text))


def with_(base: RateCardConfig, **changes: Any) -> RateCardConfig:
    return msgspec.structs.replace(base, **changes)


class TestBatch:
    def test_a_batch_pays_its_own_prices_and_nothing_else_does(self) -> None:
        rates = book(with_(card(), batch=HALF))
        full, half = (rates.price(record(surface=surface)) for surface in ("v1", "batch"))
        assert (full.amount_nanos, half.amount_nanos) == (350_000, 175_000)
        assert half.rate_card_version == "2026-01-01 300000/50000/1500000 batch"
        assert rates_of_version(half.rate_card_version) == (300_000, 50_000, 1_500_000)
        assert half.neurons_e4 * 2 == pytest.approx(full.neurons_e4, rel=1e-4)

    def test_without_batch_prices_a_batch_pays_the_same(self) -> None:
        assert book().price(record(surface="batch")) == book().price(record())

    def test_a_missing_cached_price_is_the_batch_input_price(self) -> None:
        rates = book(with_(card(), batch=BatchPricesConfig(input="0.30", output="1.50")))
        charge = rates.price(record(surface="batch", prompt_tokens=1_000, cached_prompt_tokens=1_000))
        assert charge.lines[1].rate_micros == 300_000
        assert charge.discount_nanos == 0

    def test_a_bad_batch_price_is_named(self) -> None:
        with pytest.raises(BillingConfigError, match=r"billing\.rate_cards\[0\]\.batch\.output: 'x'"):
            book(with_(card(), batch=BatchPricesConfig(input="1", output="x")))


class TestAccounts:
    def test_an_account_pays_its_own_card_and_others_do_not(self) -> None:
        rates = book(card(), with_(card(input="0.50"), account=ACCOUNT))
        own, other = (rates.price(record(account_id=account)) for account in (ACCOUNT, OTHER_ACCOUNT))
        assert own.lines[0].rate_micros == 500_000
        assert own.rate_card_version == "2026-01-01 500000/100000/3000000 account"
        assert other == book().price(record())

    def test_from_midnight_to_midnight_by_the_start_of_the_request(self) -> None:
        own = with_(card(effective_from="2026-03-01", input="0.5"), account=ACCOUNT)
        rates = book(card(), with_(own, effective_until="2026-06-01"))
        prices = [
            rates.card_for(KIMI, moment, ACCOUNT).input.micros_per_million
            for moment in (at("2026-03-01") - 1, at("2026-03-01"), at("2026-06-01") - 1, at("2026-06-01"))
        ]
        assert prices == [600_000, 500_000, 500_000, 600_000]

    def test_a_new_card_for_everybody_does_not_end_an_account_s_own(self) -> None:
        own = with_(card(input="0.5"), account=ACCOUNT)
        rates = book(card(), own, card(effective_from="2026-05-01", input="0.9"))
        assert rates.card_for(KIMI, at("2026-07-01"), ACCOUNT).input.micros_per_million == 500_000
        assert rates.card_for(KIMI, at("2026-07-01")).input.micros_per_million == 900_000

    def test_an_account_s_card_does_not_make_a_model_known_to_all(self) -> None:
        assert not book(with_(card(), account=ACCOUNT)).covers(KIMI)

    @pytest.mark.parametrize(
        ("changes", "problem"),
        [
            ({"account": "me"}, "account: 'me' is not 32 hexadecimal characters"),
            ({"effective_until": "2026-05-01"}, "effective_until: is for cards of one account only"),
            (
                {"account": ACCOUNT, "effective_until": "2026-01-01"},
                "effective_until: is not after effective_from",
            ),
        ],
    )
    def test_what_makes_no_sense_is_refused(self, changes: dict[str, str], problem: str) -> None:
        with pytest.raises(BillingConfigError, match=rf"billing\.rate_cards\[0\]\.{problem}"):
            book(with_(card(), **changes))

    def test_two_cards_of_one_account_and_date_are_refused(self) -> None:
        own = with_(card(), account=ACCOUNT)
        with pytest.raises(BillingConfigError, match="has a card from 2026-01-01 already"):
            book(card(), own, own)


class TestFreeAllocation:
    def test_free_neurons_cover_their_share_of_the_price(self) -> None:
        whole = book().price(record())
        half = book().price(record(free_neurons_e4=whole.neurons_e4 // 2))
        assert half.free_nanos == half.amount_nanos == whole.amount_nanos // 2
        assert half.neurons_e4 == whole.neurons_e4
        assert half.lines == whole.lines

    def test_all_of_it_costs_nothing(self) -> None:
        whole = book().price(record())
        free = book().price(record(free_neurons_e4=whole.neurons_e4))
        assert (free.amount_nanos, free.free_nanos) == (0, whole.amount_nanos)

    @given(st.integers(0, 10**6), st.integers(0, 10**6), st.integers(0, 10**6), st.integers(0, 10**9))
    def test_is_rounded_once_half_to_even(self, fresh: int, cached: int, output: int, free: int) -> None:
        of = {
            "prompt_tokens": fresh + cached,
            "cached_prompt_tokens": cached,
            "completion_tokens": output,
        }
        whole = book().price(record(**of))
        charge = book().price(record(**of, free_neurons_e4=free))
        share = min(Fraction(free, whole.neurons_e4), Fraction(1)) if whole.neurons_e4 else Fraction(1)
        assert charge.free_nanos == (round(whole.amount_nanos * share) if free else 0)
        assert charge.amount_nanos + charge.free_nanos == whole.amount_nanos
        assert charge.discount_nanos == whole.discount_nanos

    def test_an_account_may_have_another_allocation(self) -> None:
        config = BillingConfig(
            free_neurons_per_day=10_000,
            accounts={ACCOUNT: AccountBillingConfig(free_neurons_per_day=0)},
        )
        assert config.free_neurons_of(ACCOUNT) == 0
        assert config.free_neurons_of(OTHER_ACCOUNT) == 10_000
        assert RateBook.from_config(BillingConfig()).covers(KIMI) is False
