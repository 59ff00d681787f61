"""Charged usage as other programs take it: FOCUS rows and CloudEvents, streamed in a fixed order.

A FOCUS row is one token class of one account, API token, model and rate card in one charge period; the
database does the adding up, exactly, before anything is rounded. A CloudEvent is one token class of one
request. Both have ids that follow from what they say, so that whoever reads an export twice counts it once.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterator
from typing import Any, Literal

import msgspec
from sqlalchemy import ColumnElement, Connection, Row, and_, func, literal_column, or_, select

from billing import schema
from billing.buckets import bucket_start
from billing.periods import MICROS_PER_DAY, Period, instant_text
from billing.rates import CACHED_INPUT, INPUT, OUTPUT, rates_of_version
from billing.reports import in_period
from billing.rollups import MICROS_PER_HOUR

Width = Literal["hour", "day"]

FREE = "free_allocation"
SOURCE = "embergate"
EVENT_TYPE = "llm.tokens"

_ROWS_PER_FETCH = 1_000
_WIDTHS_US: dict[Width, int] = {"hour": MICROS_PER_HOUR, "day": MICROS_PER_DAY}
_USAGE, _LEDGER = schema.usage_records.c, schema.ledger_transactions.c


class ExportedCharge(msgspec.Struct, frozen=True, kw_only=True):
    """One token class in one charge period. ``rate_micros`` per million tokens; 0 for the free allocation.

    ``list_micros`` is the price without the discount for cached tokens: that of input.
    """

    id: str
    start_us: int
    end_us: int
    account_id: str
    account_name: str
    token_id: str
    token_name: str
    model: str
    is_batch: bool
    rate_card_version: str
    token_class: str
    num_requests: int
    num_tokens: int
    rate_micros: int
    list_micros: int
    amount_nanos: int


class TokenEvent(msgspec.Struct, frozen=True, kw_only=True):
    """A CloudEvent 1.0 about one token class of one request, as OpenMeter's meters add it up."""

    specversion: str
    id: str
    source: str
    type: str
    subject: str
    time: str
    datacontenttype: str
    data: dict[str, str | int]


class EventPosition(msgspec.Struct, frozen=True):
    """Behind which request a reader of events goes on: when it was posted, and its id."""

    posted_at_us: int = -1
    request_id: str = ""


def charges(
    connection: Connection, period: Period, *, account_id: str | None = None, width: Width = "day"
) -> Iterator[ExportedCharge]:
    """Every charged token class of requests that started within ``period``, in order of time and account."""
    width_us = _WIDTHS_US[width]
    start = bucket_start(_USAGE.started_at_us, width_us).label("start_us")
    # Written out: PostgreSQL takes two parameters for two different expressions, see billing.buckets.
    is_batch: ColumnElement[int] = literal_column(
        "CASE WHEN usage_records.surface = 'batch' THEN 1 ELSE 0 END"
    ).label("is_batch")
    keys = (start, _USAGE.account_id, _USAGE.token_id, _USAGE.model, is_batch, _LEDGER.rate_card_version)
    sums = {
        "num_input": _USAGE.prompt_tokens - _USAGE.cached_prompt_tokens,
        "num_cached": _USAGE.cached_prompt_tokens,
        "num_output": _USAGE.completion_tokens,
        "input_nanos": _LEDGER.input_nanos,
        "cached_input_nanos": _LEDGER.cached_input_nanos,
        "output_nanos": _LEDGER.output_nanos,
        "free_nanos": _LEDGER.free_nanos,
    }
    grouped = (
        select(
            *keys,
            func.count().label("num_requests"),
            *(func.sum(column).label(name) for name, column in sums.items()),
        )
        .join_from(schema.usage_records, schema.ledger_transactions, _LEDGER.id == _USAGE.request_id)
        .where(_LEDGER.rate_card_version.like("% %"), *in_period(period, account_id))
        .group_by(*keys)
        .subquery()
    )
    accounts, tokens, columns = schema.accounts.c, schema.api_tokens.c, grouped.c
    query = (
        select(
            grouped,
            func.coalesce(accounts.name, "").label("account_name"),
            func.coalesce(tokens.name, "").label("token_name"),
        )
        .outerjoin(schema.accounts, accounts.id == columns.account_id)
        .outerjoin(schema.api_tokens, tokens.id == columns.token_id)
        .order_by(
            columns.start_us,
            columns.account_id,
            columns.model,
            columns.token_id,
            columns.is_batch,
            columns.rate_card_version,
        )
    )
    for row in connection.execution_options(yield_per=_ROWS_PER_FETCH).execute(query):
        yield from _charges_of(row, width_us)


def events(
    connection: Connection,
    *,
    period: Period = Period(),  # noqa: B008 - frozen
    account_id: str | None = None,
    after: EventPosition = EventPosition(),  # noqa: B008 - frozen
    posted_before_us: int | None = None,
    max_requests: int | None = None,
) -> Iterator[tuple[EventPosition, list[TokenEvent]]]:
    """Events of charged requests in the order of their posting, those of one request together.

    ``posted_before_us`` leaves out what is so new that an earlier one may still be on its way.
    """
    query = (
        select(schema.usage_records, _LEDGER.posted_at_us)
        .join_from(schema.ledger_transactions, schema.usage_records, _LEDGER.id == _USAGE.request_id)
        .where(_LEDGER.rate_card_version != "", *in_period(period, account_id))
        .where(
            or_(
                _LEDGER.posted_at_us > after.posted_at_us,
                and_(_LEDGER.posted_at_us == after.posted_at_us, _LEDGER.id > after.request_id),
            )
        )
        .order_by(_LEDGER.posted_at_us, _LEDGER.id)
    )
    if posted_before_us is not None:
        query = query.where(_LEDGER.posted_at_us < posted_before_us)
    if max_requests is not None:
        query = query.limit(max_requests)
    for row in connection.execution_options(yield_per=_ROWS_PER_FETCH).execute(query):
        yield EventPosition(int(row.posted_at_us), row.request_id), _events_of(row)


def _charges_of(row: Row[Any], width_us: int) -> Iterator[ExportedCharge]:
    """A row for each class that was used; the free allocation is one with a negative amount."""
    input_micros, cached_micros, output_micros = rates_of_version(row.rate_card_version)
    parts = (
        (INPUT, row.num_input, input_micros, input_micros, row.input_nanos),
        (CACHED_INPUT, row.num_cached, cached_micros, input_micros, row.cached_input_nanos),
        (OUTPUT, row.num_output, output_micros, output_micros, row.output_nanos),
        (FREE, 0, 0, 0, -int(row.free_nanos)),
    )
    key = (
        row.start_us,
        width_us,
        row.account_id,
        row.token_id,
        row.model,
        row.is_batch,
        row.rate_card_version,
    )
    for token_class, num_tokens, rate_micros, list_micros, nanos in parts:
        if num_tokens or nanos:
            yield ExportedCharge(
                id=_id_of(*key, token_class),
                start_us=int(row.start_us),
                end_us=int(row.start_us) + width_us,
                account_id=row.account_id,
                account_name=row.account_name or row.account_id,
                token_id=row.token_id,
                token_name=row.token_name or row.token_id,
                model=row.model,
                is_batch=bool(row.is_batch),
                rate_card_version=row.rate_card_version,
                token_class=token_class,
                num_requests=int(row.num_requests),
                num_tokens=int(num_tokens),
                rate_micros=rate_micros,
                list_micros=list_micros,
                amount_nanos=int(nanos),
            )


def _events_of(row: Row[Any]) -> list[TokenEvent]:
    counts = (
        ("input", row.prompt_tokens - row.cached_prompt_tokens),
        ("cached_input", row.cached_prompt_tokens),
        ("output", row.completion_tokens),
    )
    return [
        TokenEvent(
            specversion="1.0",
            id=f"{row.request_id}:{token_class}",
            source=SOURCE,
            type=EVENT_TYPE,
            subject=row.account_id,
            time=instant_text(row.started_at_us),
            datacontenttype="application/json",
            data={
                "model": row.model,
                "type": token_class,
                "tokens": num_tokens,
                "token_id": row.token_id,
                "session": row.session,
                "request_id": row.request_id,
            },
        )
        for token_class, num_tokens in counts
        if num_tokens
    ]


def _id_of(*parts: str | int) -> str:
    text = "\x1f".join(str(part) for part in parts)
    return hashlib.sha256(text.encode()).hexdigest()[:32]
