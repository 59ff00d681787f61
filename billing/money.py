"""Integer money and the one rounding rule.

Units, smallest last: a rate is micro-dollars per million tokens, so a token at rate ``r`` costs exactly ``r``
pico-dollars. A line of a charge is ``tokens * rate`` pico-dollars, exact, and is rounded once, half to even,
to nano-dollars. Nothing here or downstream is a float.
"""

from __future__ import annotations

import re
from collections.abc import Iterable

NANOS_PER_UNIT = 1_000_000_000
MICROS_PER_UNIT = 1_000_000
PICOS_PER_NANO = 1_000
NANOS_PER_MICRO = 1_000
_HALF_NANO = PICOS_PER_NANO // 2

_DECIMAL = re.compile(r"(\d{1,9})(?:\.(\d{1,6}))?")


def round_half_even(numerator: int, denominator: int) -> int:
    """``numerator / denominator`` to the nearest integer, ties to the even one. ``denominator`` > 0."""
    quotient, remainder = divmod(numerator, denominator)
    twice = 2 * remainder
    if twice > denominator or (twice == denominator and quotient & 1):
        return quotient + 1
    return quotient


def line_nanos(num_tokens: int, rate_micros: int) -> int:
    """Price of ``num_tokens`` at ``rate_micros`` (micro-dollars per million tokens), in nano-dollars."""
    nanos, rest = divmod(num_tokens * rate_micros, PICOS_PER_NANO)  # as round_half_even does, without a call
    if rest > _HALF_NANO or (rest == _HALF_NANO and nanos & 1):
        return nanos + 1
    return nanos


def parse_micros(text: str) -> int:
    """A plain non-negative decimal such as ``"0.60"`` as an integer of millionths.

    Raises:
        ValueError: not of the form digits[.digits], more than nine digits before the point or six after it.
    """
    match = _DECIMAL.fullmatch(text)
    if match is None or not text.isascii():
        raise ValueError(
            f"{text!r} is not a plain decimal number with at most nine digits before the point and six after"
        )
    whole, fraction = match.group(1), match.group(2) or ""
    return int(whole) * MICROS_PER_UNIT + int(fraction.ljust(6, "0"))


def format_nanos(nanos: int, min_places: int = 2) -> str:
    """An exact decimal string: ``8_603_760`` -> ``"0.00860376"``, at least ``min_places`` after the point."""
    sign = "-" if nanos < 0 else ""
    whole, fraction = divmod(abs(nanos), NANOS_PER_UNIT)
    digits = f"{fraction:09d}".rstrip("0").ljust(min_places, "0")
    return f"{sign}{whole}.{digits}" if digits else f"{sign}{whole}"


def places_of(amounts_nanos: Iterable[int]) -> int:
    """Decimal places that show all of the amounts exactly, at least 2: for columns that line up."""
    return max((len(format_nanos(nanos).partition(".")[2]) for nanos in amounts_nanos), default=2)
