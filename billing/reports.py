"""Answers about usage for the command line: what was consumed and what it cost, grouped as asked.

Every report reads one state of the database and is a msgspec Struct, so that JSON is one call away. Amounts
stand twice: exact integers of nano-dollars, and the same as a decimal string.
"""

from __future__ import annotations

from typing import Any, Literal

import msgspec
from sqlalchemy import ColumnElement, Row, Select, case, func, literal_column, select

from billing.buckets import bucket_number
from billing.ledger import receivable
from billing.money import format_nanos
from billing.periods import MICROS_PER_DAY, Period, day_text, instant_text
from billing.schema import ledger_entries, ledger_transactions, usage_records
from billing.store import Store
from billing.usage import STATUSES

GroupBy = Literal["model", "session", "day", "account", "request"]

_BY_TIME: tuple[GroupBy, ...] = ("day", "request")

_USAGE = usage_records.c
_LEDGER = ledger_transactions.c


class UsageRow(msgspec.Struct, frozen=True, kw_only=True):
    """Sums over one group of requests.

    ``key`` is the model, session, day, account or request id; "" for a total. ``account_id`` is "" where a
    group spans accounts. ``cached_share`` is cached over all prompt tokens, 0 when there are none.
    ``discount_nanos`` is what caching saved. Tokens count all requests, amounts only those that are charged.
    """

    key: str
    account_id: str
    num_requests: int
    num_by_status: dict[str, int]
    num_estimated: int
    prompt_tokens: int
    cached_prompt_tokens: int
    completion_tokens: int
    reasoning_tokens: int
    cached_share: float
    amount_nanos: int
    undiscounted_nanos: int
    discount_nanos: int
    amount: str
    undiscounted: str
    discount: str
    neurons: float


class UsageSummary(msgspec.Struct, frozen=True, kw_only=True):
    """``rows`` in order of key for days and requests, dearest first otherwise; ``total`` covers all of them.

    ``is_truncated``: there were more groups than ``max_rows``, and the earliest or cheapest are left out.
    ``since`` and ``until`` are ISO 8601 or None.
    """

    by: GroupBy | None
    account_id: str | None
    since: str | None
    until: str | None
    currency: str
    rows: list[UsageRow]
    is_truncated: bool
    total: UsageRow


def usage_summary(
    store: Store,
    *,
    by: GroupBy | None = None,
    account_id: str | None = None,
    period: Period = Period(),  # noqa: B008 - frozen
    max_rows: int = 1_000,
    currency: str = "USD",
) -> UsageSummary:
    """Usage of one account or all, of requests that started within ``period``. Raises StoreError."""
    conditions = in_period(period, account_id)
    with store.reading() as connection:
        total = connection.execute(_summed([], conditions)).one()
        grouped = []
        if by is not None:
            query = _summed(_keys(by), conditions).limit(max_rows + 1)
            grouped = list(connection.execute(query.order_by(*_order(by))))
    shown = grouped[:max_rows]
    if by in _BY_TIME:
        shown.reverse()
    return UsageSummary(
        by=by,
        account_id=account_id,
        since=None if period.start_us is None else instant_text(period.start_us),
        until=None if period.end_us is None else instant_text(period.end_us),
        currency=currency,
        rows=[_usage_row(row, by) for row in shown],
        is_truncated=len(grouped) > max_rows,
        total=_usage_row(total, None),
    )


def balance_nanos(store: Store, account_id: str) -> int:
    """What the account owes: the sum of its receivable."""
    query = select(func.sum(ledger_entries.c.amount_nanos)).where(
        ledger_entries.c.ledger_account == receivable(account_id)
    )
    with store.reading() as connection:
        return int(connection.scalar(query) or 0)


def in_period(period: Period, account_id: str | None) -> list[ColumnElement[bool]]:
    """Conditions on usage records: ``[start, end)`` of their start, and the account."""
    conditions: list[ColumnElement[bool]] = []
    if account_id is not None:
        conditions.append(_USAGE.account_id == account_id)
    if period.start_us is not None:
        conditions.append(_USAGE.started_at_us >= period.start_us)
    if period.end_us is not None:
        conditions.append(_USAGE.started_at_us < period.end_us)
    return conditions


def _summed(keys: list[ColumnElement[Any]], conditions: list[ColumnElement[bool]]) -> Select[Any]:
    """Sums per group; without keys, one row over everything."""
    sums = [
        func.coalesce(func.sum(column), 0).label(column.name)
        for column in (
            _USAGE.prompt_tokens,
            _USAGE.cached_prompt_tokens,
            _USAGE.completion_tokens,
            _USAGE.reasoning_tokens,
            _LEDGER.amount_nanos,
            _LEDGER.undiscounted_nanos,
            _LEDGER.neurons_e4,
        )
    ]
    counts = [_counted(_USAGE.status == status).label(f"num_{status}") for status in STATUSES]
    return (
        select(
            *keys,
            func.count().label("num_requests"),
            _counted(_USAGE.is_estimated).label("num_estimated"),
            *counts,
            *sums,
        )
        .select_from(usage_records)
        .outerjoin(ledger_transactions, _LEDGER.id == _USAGE.request_id)
        .where(*conditions)
        .group_by(*keys)
    )


def _counted(condition: ColumnElement[bool]) -> ColumnElement[int]:
    return func.coalesce(func.sum(case((condition, 1), else_=0)), 0)


def _keys(by: GroupBy) -> list[ColumnElement[Any]]:
    """What to group by, labelled ``key`` and ``account_id``."""
    if by == "model":
        return [_USAGE.model.label("key")]
    if by == "day":
        return [bucket_number(_USAGE.started_at_us, MICROS_PER_DAY).label("key")]
    if by == "account":
        return [_USAGE.account_id.label("key")]
    key = _USAGE.session if by == "session" else _USAGE.request_id
    return [key.label("key"), _USAGE.account_id.label("account_id")]


def _order(by: GroupBy) -> list[ColumnElement[Any]]:
    if by in _BY_TIME:  # the latest, when there are more than fit
        return [literal_column("key").desc()]
    return [func.sum(_LEDGER.amount_nanos).desc(), literal_column("key").asc()]


def _usage_row(row: Row[Any], by: GroupBy | None) -> UsageRow:
    sums = row._mapping
    prompt_tokens, cached = int(sums["prompt_tokens"]), int(sums["cached_prompt_tokens"])
    amount, undiscounted = int(sums["amount_nanos"]), int(sums["undiscounted_nanos"])
    key = "" if by is None else day_text(int(sums["key"])) if by == "day" else str(sums["key"])
    return UsageRow(
        key=key,
        account_id=key if by == "account" else str(sums.get("account_id", "")),
        num_requests=int(sums["num_requests"]),
        num_by_status={status: int(sums[f"num_{status}"]) for status in STATUSES},
        num_estimated=int(sums["num_estimated"]),
        prompt_tokens=prompt_tokens,
        cached_prompt_tokens=cached,
        completion_tokens=int(sums["completion_tokens"]),
        reasoning_tokens=int(sums["reasoning_tokens"]),
        cached_share=cached / prompt_tokens if prompt_tokens else 0.0,
        amount_nanos=amount,
        undiscounted_nanos=undiscounted,
        discount_nanos=undiscounted - amount,
        amount=format_nanos(amount),
        undiscounted=format_nanos(undiscounted),
        discount=format_nanos(undiscounted - amount),
        neurons=int(sums["neurons_e4"]) / 10_000,
    )
