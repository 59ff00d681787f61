from __future__ import annotations

from decimal import ROUND_HALF_EVEN, Decimal
from fractions import Fraction

import pytest
from hypothesis import given
from hypothesis import strategies as st

from billing.money import format_nanos, line_nanos, parse_micros, places_of, round_half_even


@given(numerator=st.integers(-(10**30), 10**30), denominator=st.integers(1, 10**12))
def test_rounding_is_half_even_like_fractions(numerator: int, denominator: int) -> None:
    assert round_half_even(numerator, denominator) == round(Fraction(numerator, denominator))


@pytest.mark.parametrize(
    ("numerator", "rounded"),
    [(500, 0), (501, 1), (1_500, 2), (2_500, 2), (2_501, 3), (-500, 0), (-1_500, -2), (999, 1), (0, 0)],
)
def test_ties_go_to_the_even_neighbour(numerator: int, rounded: int) -> None:
    assert round_half_even(numerator, 1_000) == rounded


@given(tokens=st.integers(0, 2**31 - 1), micros=st.integers(0, 10**12))
def test_a_line_is_the_exact_product_rounded_once(tokens: int, micros: int) -> None:
    dollars = Decimal(tokens) * Decimal(micros).scaleb(-12)
    expected = dollars.quantize(Decimal("1e-9"), rounding=ROUND_HALF_EVEN)
    assert Decimal(line_nanos(tokens, micros)).scaleb(-9) == expected


@pytest.mark.parametrize(
    ("text", "micros"),
    [("0.60", 600_000), ("0.10", 100_000), ("3", 3_000_000), ("0.011", 11_000), ("0.000001", 1), ("0", 0)],
)
def test_a_decimal_is_read_exactly(text: str, micros: int) -> None:
    assert parse_micros(text) == micros


@pytest.mark.parametrize(
    "text",
    [
        "",
        "-1",
        "+1",
        "1e3",
        ".5",
        "5.",
        "0.1234567",
        "1,5",
        "1_000",
        " 1",
        "1\n",
        "NaN",
        "inf",
        "1234567890",
        "١",
    ],
)
def test_anything_but_a_plain_decimal_is_refused(text: str) -> None:
    with pytest.raises(ValueError, match="plain decimal"):
        parse_micros(text)


@pytest.mark.parametrize(
    ("nanos", "text"),
    [
        (8_603_760, "0.00860376"),
        (0, "0.00"),
        (1_500_000_000, "1.50"),
        (-1, "-0.000000001"),
        (12_345_678_901, "12.345678901"),
        (10**9, "1.00"),
    ],
)
def test_amounts_are_shown_exactly(nanos: int, text: str) -> None:
    assert format_nanos(nanos) == text


@given(nanos=st.integers(-(10**18), 10**18))
def test_a_shown_amount_reads_back_as_itself(nanos: int) -> None:
    assert Decimal(format_nanos(nanos)) == Decimal(nanos).scaleb(-9)


def test_places_show_every_amount_exactly() -> None:
    assert places_of([]) == 2
    assert places_of([10_000_000]) == 2
    assert places_of([10_000_000, 79_100, 59_260]) == 8
