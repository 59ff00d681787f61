"""What one account owes for one month, line by line.

A line is a model, the rate card that was in force, and a token class. Its amount is the sum of what the
requests were charged for that class, so lines add up to the ledger exactly, whatever rates changed meanwhile.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from typing import Any

import msgspec
from sqlalchemy import Row, Select, case, func, select

from billing.credits import Credit, balance_before, credits_in
from billing.money import NANOS_PER_MICRO, format_nanos
from billing.periods import Period, instant_text, month_period
from billing.rates import CACHED_INPUT, INPUT, NO_CHARGE, OUTPUT, UNPRICED, rates_of_version
from billing.reports import in_period
from billing.schema import accounts, ledger_transactions, usage_records
from billing.store import Store

FREE_ALLOCATION = "free_allocation"
"""The token class of a line that says what was free: a negative amount."""

_USAGE = usage_records.c
_LEDGER = ledger_transactions.c
_WITHOUT_CARD = frozenset({NO_CHARGE.rate_card_version, UNPRICED.rate_card_version})


class UnknownAccountError(LookupError):
    """There is no such account."""


class StatementLine(msgspec.Struct, frozen=True, kw_only=True):
    """One token class of one model at one price: ``rate`` dollars per million tokens, a decimal string."""

    model: str
    token_class: str
    rate_card_version: str
    rate: str
    num_tokens: int
    amount_nanos: int
    amount: str
    undiscounted_nanos: int
    discount_nanos: int


class Statement(msgspec.Struct, frozen=True, kw_only=True):
    """A month, half-open and UTC: ``since`` inclusive, ``until`` exclusive.

    ``as_of`` is when a statement of a month that is not over was made: more will come; None when it is over.
    ``num_not_charged`` requests failed through no fault of the account; ``num_unpriced`` had no rate card.
    ``amount_nanos`` is what the month's requests were charged, ``free_nanos`` what their free allocation
    covered. ``credits`` were booked within the month; a balance is credit that is left, negative where the
    account owes. A credit note counts in the month of its booking, whenever its request ran.
    """

    account_id: str
    account_name: str
    month: str
    since: str
    until: str
    as_of: str | None
    currency: str
    lines: list[StatementLine]
    num_requests: int
    num_not_charged: int
    num_unpriced: int
    num_estimated: int
    amount_nanos: int
    undiscounted_nanos: int
    discount_nanos: int
    amount: str
    undiscounted: str
    discount: str
    neurons: float
    free_nanos: int
    credits: list[Credit]
    topped_up_nanos: int
    given_back_nanos: int
    opening_balance_nanos: int
    closing_balance_nanos: int
    opening_balance: str
    closing_balance: str


def monthly_statement(store: Store, account_id: str, month: str, *, currency: str = "USD") -> Statement:
    """The statement of ``month`` (YYYY-MM).

    Raises:
        ValueError: ``month`` is not of that form.
        UnknownAccountError, StoreError.
    """
    period = month_period(month)
    assert period.start_us is not None
    assert period.end_us is not None
    now_us = time.time_ns() // 1_000
    with store.reading() as connection:
        name = connection.scalar(select(accounts.c.name).where(accounts.c.id == account_id))
        groups = list(connection.execute(_groups(period, account_id)))
        booked = credits_in(connection, account_id, period)
        opening = balance_before(connection, account_id, period.start_us).balance_nanos
    if name is None:
        raise UnknownAccountError(f"there is no account {account_id!r}")
    priced = [group for group in groups if group.rate_card_version not in _WITHOUT_CARD]
    amount = _total(groups, "amount_nanos")
    undiscounted = _total(groups, "undiscounted_nanos")
    topped_up = sum(credit.amount_nanos for credit in booked if credit.kind == "top_up")
    given_back = sum(credit.amount_nanos for credit in booked if credit.kind == "credit_note")
    closing = opening + topped_up + given_back - amount
    return Statement(
        account_id=account_id,
        account_name=name,
        month=month,
        since=instant_text(period.start_us),
        until=instant_text(period.end_us),
        as_of=instant_text(now_us) if now_us < period.end_us else None,
        currency=currency,
        lines=[line for group in priced for line in _lines(group)],
        num_requests=_total(groups, "num_requests"),
        num_not_charged=_total(_of_version(groups, NO_CHARGE.rate_card_version), "num_requests"),
        num_unpriced=_total(_of_version(groups, UNPRICED.rate_card_version), "num_requests"),
        num_estimated=_total(groups, "num_estimated"),
        amount_nanos=amount,
        undiscounted_nanos=undiscounted,
        discount_nanos=undiscounted - amount,
        amount=format_nanos(amount),
        undiscounted=format_nanos(undiscounted),
        discount=format_nanos(undiscounted - amount),
        neurons=_total(groups, "neurons_e4") / 10_000,
        free_nanos=_total(groups, "free_nanos"),
        credits=booked,
        topped_up_nanos=topped_up,
        given_back_nanos=given_back,
        opening_balance_nanos=opening,
        closing_balance_nanos=closing,
        opening_balance=format_nanos(opening),
        closing_balance=format_nanos(closing),
    )


def _groups(period: Period, account_id: str) -> Select[Any]:
    """Sums per model and rate card, in a stable order."""
    uncached = _USAGE.prompt_tokens - _USAGE.cached_prompt_tokens
    columns = {
        "num_estimated": case((_USAGE.is_estimated, 1), else_=0),
        "num_input": uncached,
        "num_cached_input": _USAGE.cached_prompt_tokens,
        "num_output": _USAGE.completion_tokens,
        "input_nanos": _LEDGER.input_nanos,
        "cached_input_nanos": _LEDGER.cached_input_nanos,
        "output_nanos": _LEDGER.output_nanos,
        "amount_nanos": _LEDGER.amount_nanos,
        "undiscounted_nanos": _LEDGER.undiscounted_nanos,
        "neurons_e4": _LEDGER.neurons_e4,
        "free_nanos": _LEDGER.free_nanos,
    }
    return (
        select(
            _USAGE.model,
            _LEDGER.rate_card_version,
            func.count().label("num_requests"),
            *(func.sum(column).label(name) for name, column in columns.items()),
        )
        .select_from(usage_records)
        .join(ledger_transactions, _LEDGER.id == _USAGE.request_id)
        .where(*in_period(period, account_id))
        .group_by(_USAGE.model, _LEDGER.rate_card_version)
        .order_by(_USAGE.model, _LEDGER.rate_card_version)
    )


def _lines(group: Row[Any]) -> list[StatementLine]:
    """Input, cached input and output, and what was free; all of a group's discount is the cached input's."""
    discount = int(group.undiscounted_nanos) - int(group.amount_nanos)
    parts = (
        (INPUT, group.num_input, group.input_nanos, 0),
        (CACHED_INPUT, group.num_cached_input, group.cached_input_nanos, discount),
        (OUTPUT, group.num_output, group.output_nanos, 0),
    )
    rates = rates_of_version(group.rate_card_version)
    lines = [
        StatementLine(
            model=group.model,
            token_class=token_class,
            rate_card_version=group.rate_card_version,
            rate=format_nanos(rate_micros * NANOS_PER_MICRO),
            num_tokens=int(num_tokens),
            amount_nanos=int(nanos),
            amount=format_nanos(int(nanos)),
            undiscounted_nanos=int(nanos) + saved,
            discount_nanos=saved,
        )
        for (token_class, num_tokens, nanos, saved), rate_micros in zip(parts, rates, strict=True)
    ]
    free = int(group.free_nanos)
    return [*lines, _free_line(group, free)] if free else lines


def _free_line(group: Row[Any], free_nanos: int) -> StatementLine:
    """What the daily free allocation covered of the lines before it."""
    return StatementLine(
        model=group.model,
        token_class=FREE_ALLOCATION,
        rate_card_version=group.rate_card_version,
        rate="0.00",
        num_tokens=0,
        amount_nanos=-free_nanos,
        amount=format_nanos(-free_nanos),
        undiscounted_nanos=-free_nanos,
        discount_nanos=0,
    )


def _of_version(groups: Sequence[Row[Any]], version: str) -> list[Row[Any]]:
    return [group for group in groups if group.rate_card_version == version]


def _total(groups: Sequence[Row[Any]], column: str) -> int:
    return sum(int(group._mapping[column]) for group in groups)
