from __future__ import annotations

from decimal import ROUND_HALF_EVEN, Decimal
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from billing.config import BillingConfig, BillingConfigError, RateCardConfig
from billing.periods import day_start_us, parse_date
from billing.rates import NoRateError, RateBook, rates_of_version
from billing.usage import STATUSES
from tests.support.ledger import FREE, KIMI, PLAIN, book, card, record


def at(text: str) -> int:
    return day_start_us(parse_date(text))


class TestPrice:
    def test_the_fireworks_case_to_the_last_digit(self) -> None:
        """BR-26: 27,147 prompt tokens, all but one cached, 351 completion tokens cost exactly 0.00860376."""
        rates = book(card("glm", input="1.4", cached_input="0.26", output="4.4"))
        charge = rates.price(
            record(model="glm", prompt_tokens=27_147, cached_prompt_tokens=27_146, completion_tokens=351)
        )
        assert charge.amount_nanos == 8_603_760

    def test_a_missing_cached_price_is_the_input_price_never_nothing(self) -> None:
        """BR-26, the reverse form."""
        cached = book().price(record(model=PLAIN, prompt_tokens=1_000, cached_prompt_tokens=1_000))
        cold = book().price(record(model=PLAIN, prompt_tokens=1_000, cached_prompt_tokens=0))
        assert cached.amount_nanos == cold.amount_nanos > 0
        assert cached.discount_nanos == 0

    def test_a_cached_price_of_zero_is_a_price(self) -> None:
        rates = book(card(cached_input="0"))
        assert rates.price(record(completion_tokens=0, cached_prompt_tokens=1_000)).amount_nanos == 0

    def test_lines_name_what_is_charged(self) -> None:
        """BR-30: what is billed as cached is exactly what was reported as cached."""
        charge = book().price(record(prompt_tokens=1_000, cached_prompt_tokens=800, completion_tokens=50))
        assert [(line.token_class, line.num_tokens, line.amount_nanos) for line in charge.lines] == [
            ("input", 200, 120_000),
            ("cached_input", 800, 80_000),
            ("output", 50, 150_000),
        ]
        assert charge.amount_nanos == 350_000
        assert charge.undiscounted_nanos == 750_000
        assert charge.discount_nanos == 400_000

    def test_the_surface_changes_no_price(self) -> None:
        """BR-28: one convention inside, prompt tokens include cached ones, so every API costs the same."""
        amounts = {book().price(record(surface=surface)).amount_nanos for surface in ("run", "v1", "binding")}
        assert len(amounts) == 1

    @pytest.mark.parametrize("status", STATUSES)
    def test_a_client_that_left_pays_and_our_failures_are_free(self, status: str) -> None:
        charge = book().price(record(status=status))
        if status in ("ok", "client_disconnected"):
            assert charge.amount_nanos > 0
        else:
            assert (charge.amount_nanos, charge.undiscounted_nanos, charge.neurons_e4, charge.lines) == (
                0,
                0,
                0,
                (),
            )

    def test_an_estimate_costs_what_its_counts_say(self) -> None:
        assert book().price(record(is_estimated=True)) == book().price(record())

    def test_the_version_spells_out_the_card(self) -> None:
        charge = book().price(record())
        assert charge.rate_card_version == "2026-01-01 600000/100000/3000000"
        assert rates_of_version(charge.rate_card_version) == (600_000, 100_000, 3_000_000)

    @given(
        tokens=st.tuples(st.integers(0, 10**7), st.integers(0, 10**7), st.integers(0, 10**7)),
        micros=st.tuples(*[st.integers(0, 10**9)] * 3),
    )
    def test_agrees_with_decimals(self, tokens: tuple[int, int, int], micros: tuple[int, int, int]) -> None:
        uncached, cached, completion = tokens
        prices = [Decimal(rate).scaleb(-6) for rate in micros]
        rates = book(card("m", input=str(prices[0]), cached_input=str(prices[1]), output=str(prices[2])))

        def line(count: int, price: Decimal) -> Decimal:
            return (count * price / 10**6).quantize(Decimal("1e-9"), rounding=ROUND_HALF_EVEN)

        charge = rates.price(
            record(
                model="m",
                prompt_tokens=uncached + cached,
                cached_prompt_tokens=cached,
                completion_tokens=completion,
            )
        )
        expected = line(uncached, prices[0]) + line(cached, prices[1]) + line(completion, prices[2])
        without_cache = line(uncached, prices[0]) + line(cached, prices[0]) + line(completion, prices[2])
        assert Decimal(charge.amount_nanos).scaleb(-9) == expected
        assert Decimal(charge.undiscounted_nanos).scaleb(-9) == without_cache
        assert charge.amount_nanos == sum(line.amount_nanos for line in charge.lines)


class TestNeurons:
    def test_the_live_capture(self) -> None:
        """147 x 9,091e-6 + 16 x 27,273e-6 = 1.7727, as the live service reported."""
        gemma = book(card("gemma", input="0.10", cached_input=None, output="0.30"))
        charge = gemma.price(
            record(model="gemma", prompt_tokens=147, cached_prompt_tokens=0, completion_tokens=16)
        )
        assert charge.neurons_e4 == 17_727
        assert charge.neurons == 1.7727

    @pytest.mark.parametrize(
        ("prices", "neurons"),
        [
            (("0.60", "0.10", "3.00"), (54_545, 9_091, 272_727)),
            (("0.95", "0.16", "4.00"), (86_364, 14_545, 363_636)),
            (("0.95", "0.19", "4.00"), (86_364, 17_273, 363_636)),
            (("1.40", "0.26", "4.40"), (127_273, 23_636, 400_000)),
            (("0.44", "0.014", "1.32"), (40_000, 1_273, 120_000)),
        ],
    )
    def test_the_published_table(self, prices: tuple[str, str, str], neurons: tuple[int, int, int]) -> None:
        found = book(card("m", input=prices[0], cached_input=prices[1], output=prices[2])).card_for(
            "m", at("2026-11-30")
        )
        assert (
            found.input.neurons_per_million,
            found.cached_input.neurons_per_million,
            found.output.neurons_per_million,
        ) == neurons

    @given(prompt=st.integers(0, 10**6), completion=st.integers(0, 10**6), share=st.floats(0, 1))
    def test_agree_with_decimals_to_four_places(self, prompt: int, completion: int, share: float) -> None:
        cached = int(prompt * share)
        exact = (
            (prompt - cached) * Decimal("54545e-6")
            + cached * Decimal("9091e-6")
            + completion * Decimal("272727e-6")
        )
        expected = exact.quantize(Decimal("1e-4"), rounding=ROUND_HALF_EVEN)
        charge = book().price(
            record(prompt_tokens=prompt, cached_prompt_tokens=cached, completion_tokens=completion)
        )
        assert Decimal(charge.neurons_e4).scaleb(-4) == expected

    def test_are_the_same_before_the_record_exists(self) -> None:
        one = record()
        counts = (one.prompt_tokens, one.cached_prompt_tokens, one.completion_tokens)
        assert book().neurons(KIMI, one.started_at_us, *counts) == book().price(one).neurons_e4


class TestDates:
    """BR-32: windows are UTC and half-open; exactly midnight belongs to the new day."""

    @pytest.fixture
    def rates(self) -> RateBook:
        return book(
            card(effective_from="2026-07-01", input="2"),
            card(effective_from="2026-01-01", input="1"),
            card(effective_from="2026-10-01", input="3"),
        )

    @pytest.mark.parametrize(
        ("instant_us", "input_micros"),
        [
            (at("2026-01-01"), 1_000_000),
            (at("2026-07-01") - 1, 1_000_000),
            (at("2026-07-01"), 2_000_000),
            (at("2026-10-01") - 1, 2_000_000),
            (at("2026-10-01"), 3_000_000),
            (at("2036-10-01"), 3_000_000),
        ],
    )
    def test_the_card_of_the_start_applies(self, rates: RateBook, instant_us: int, input_micros: int) -> None:
        started = record(started_at_us=instant_us, finished_at_us=instant_us + 10**12)
        assert rates.price(started).lines[0].rate_micros == input_micros

    def test_nothing_is_in_force_before_the_first_card(self, rates: RateBook) -> None:
        too_early = record(started_at_us=at("2026-01-01") - 1)
        with pytest.raises(NoRateError, match="no rate card"):
            rates.price(too_early)
        assert not rates.covers(KIMI, too_early.started_at_us)
        assert rates.covers(KIMI, at("2026-01-01"))
        assert rates.covers(KIMI)

    def test_an_unknown_model_is_not_covered(self, rates: RateBook) -> None:
        assert not rates.covers("@cf/unknown")
        with pytest.raises(NoRateError, match="@cf/unknown"):
            rates.price(record(model="@cf/unknown"))

    def test_a_free_model_is_covered(self) -> None:
        assert book().covers(FREE)
        assert book().price(record(model=FREE)).amount_nanos == 0


class TestConfig:
    @pytest.mark.parametrize(
        ("change", "path"),
        [
            ({"input": "cheap"}, "billing.rate_cards[1].input"),
            ({"input": "-1"}, "billing.rate_cards[1].input"),
            ({"input": "0.1234567"}, "billing.rate_cards[1].input"),
            ({"input": "1000001"}, "billing.rate_cards[1].input"),
            ({"output": "1e3"}, "billing.rate_cards[1].output"),
            ({"cached_input": ""}, "billing.rate_cards[1].cached_input"),
            ({"effective_from": "2026-13-01"}, "billing.rate_cards[1].effective_from"),
            ({"effective_from": "2026-02-30"}, "billing.rate_cards[1].effective_from"),
            ({"effective_from": "01.02.2026"}, "billing.rate_cards[1].effective_from"),
            ({"effective_from": "20260201"}, "billing.rate_cards[1].effective_from"),
            ({"model": ""}, "billing.rate_cards[1].model"),
        ],
    )
    def test_a_bad_value_is_named_by_its_path(self, change: dict[str, Any], path: str) -> None:
        fields: dict[str, Any] = {"model": "m", "effective_from": "2026-01-01", "input": "1", "output": "1"}
        config = BillingConfig(rate_cards=[card(), RateCardConfig(**(fields | change))])
        with pytest.raises(BillingConfigError) as caught:
            RateBook.from_config(config)
        assert caught.value.path == path
        assert str(caught.value).startswith(path + ": ")

    def test_a_duplicate_card_names_both(self) -> None:
        config = BillingConfig(rate_cards=[card(), card(FREE), card(input="9")])
        with pytest.raises(BillingConfigError, match=r"rate_cards\[2\].*2026-01-01.*rate_cards\[0\]"):
            RateBook.from_config(config)

    @pytest.mark.parametrize(
        ("change", "path"),
        [
            ({"usd_per_thousand_neurons": "0"}, "billing.usd_per_thousand_neurons"),
            ({"usd_per_thousand_neurons": "x"}, "billing.usd_per_thousand_neurons"),
            ({"currency": "Dollars"}, "billing.currency"),
        ],
    )
    def test_other_values_are_named_too(self, change: dict[str, Any], path: str) -> None:
        with pytest.raises(BillingConfigError) as caught:
            RateBook.from_config(BillingConfig(**change))
        assert caught.value.path == path
