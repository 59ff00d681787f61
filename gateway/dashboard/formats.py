"""Numbers as pages show them."""

from __future__ import annotations

from datetime import UTC, datetime

from billing.money import NANOS_PER_UNIT, round_half_even

_SYMBOLS = {"USD": "$", "EUR": "€", "GBP": "£"}
_PLACES = ((NANOS_PER_UNIT, 2), (NANOS_PER_UNIT // 100, 4), (0, 6))
_DASH = "–"


def symbol(currency: str) -> str:
    """What stands before an amount: ``$``, or the code and a space."""
    return _SYMBOLS.get(currency, f"{currency} ")


def exact_money(nanos: int, currency: str) -> str:
    """To the last digit of the ledger: ``$0.000350000``."""
    whole, fraction = divmod(abs(nanos), NANOS_PER_UNIT)
    return f"{'-' if nanos < 0 else ''}{symbol(currency)}{whole:,}.{fraction:09d}"


def money(nanos: int, currency: str) -> str:
    """From a dollar on ``$1,234.50``, from a cent on ``$0.1234``, below ``$0.000350``."""
    mark = symbol(currency)
    sign = "-" if nanos < 0 else ""
    size = abs(nanos)
    if 0 < size < NANOS_PER_UNIT // 2_000_000:
        return f"{sign}<{mark}0.000001"
    places = next(places for least, places in _PLACES if size >= least or size == 0)
    units = round_half_even(size, NANOS_PER_UNIT // 10**places)
    whole, fraction = divmod(units, 10**places)
    return f"{sign}{mark}{whole:,}.{fraction:0{places}d}"


def count(value: int) -> str:
    """``12,345``."""
    return f"{value:,}"


def share(value: float) -> str:
    """``82.4%``."""
    return f"{value:.1%}"


def milliseconds(value: float | None) -> str:
    """``340 ms``, ``1.24 s``; a dash for None."""
    if value is None:
        return _DASH
    return (
        f"{value / 1_000:,.2f}\N{NO-BREAK SPACE}s" if value >= 1_000 else f"{value:,.0f}\N{NO-BREAK SPACE}ms"
    )


def speed(value: float | None) -> str:
    """``24.5 tok/s``, from a hundred on ``1,240 tok/s``; a dash for None."""
    if value is None:
        return _DASH
    return f"{value:,.{1 if value < 100 else 0}f}\N{NO-BREAK SPACE}tok/s"


def moment(instant_us: int | None) -> str:
    """``2026-11-30 12:00:00``, UTC; a dash for None."""
    if instant_us is None:
        return _DASH
    return datetime.fromtimestamp(instant_us / 1e6, UTC).strftime("%Y-%m-%d %H:%M:%S")


def age(seconds: float) -> str:
    """``45 s``, ``12 min``, ``3.5 h``, ``2.1 d``."""
    for size, name in ((86_400, "d"), (3_600, "h")):
        if seconds >= size:
            return f"{seconds / size:.1f} {name}"
    return f"{seconds / 60:.0f} min" if seconds >= 60 else f"{seconds:.0f} s"
