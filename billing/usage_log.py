"""Single requests, the newest first, a page at a time."""

from __future__ import annotations

from typing import Any

import msgspec
from sqlalchemy import ColumnElement, Connection, Row, Select, and_, or_, select

from billing import schema
from billing.analytics import UsageFilter
from billing.money import format_nanos
from billing.periods import instant_text

_USAGE, _LEDGER = schema.usage_records.c, schema.ledger_transactions.c
_CHARGE = ("input_nanos", "cached_input_nanos", "output_nanos", "amount_nanos", "undiscounted_nanos")


class RequestRow(msgspec.Struct, frozen=True, kw_only=True):
    """One request and what it cost. Instants are UTC microseconds; ``error`` statuses cost nothing."""

    request_id: str
    account_id: str
    token_id: str
    model: str
    requested_model: str
    surface: str
    replica_id: str
    session: str
    started_at_us: int
    finished_at_us: int
    prompt_tokens: int
    cached_prompt_tokens: int
    completion_tokens: int
    reasoning_tokens: int
    status: str
    is_estimated: bool
    ttft_us: int
    num_attempts: int
    input_nanos: int
    cached_input_nanos: int
    output_nanos: int
    amount_nanos: int
    undiscounted_nanos: int
    neurons_e4: int
    rate_card_version: str

    @property
    def duration_us(self) -> int:
        return max(self.finished_at_us - self.started_at_us, 0)

    def as_json(self) -> dict[str, Any]:
        """The fields with times, money and durations as people read them."""
        fields = {name: getattr(self, name) for name in self.__struct_fields__ if not name.endswith("_us")}
        del fields["neurons_e4"]
        return {
            **fields,
            "started_at": instant_text(self.started_at_us),
            "finished_at": instant_text(self.finished_at_us),
            "duration_ms": self.duration_us / 1_000,
            "ttft_ms": self.ttft_us / 1_000 if self.ttft_us else None,
            "amount": format_nanos(self.amount_nanos),
            "undiscounted": format_nanos(self.undiscounted_nanos),
            "neurons": self.neurons_e4 / 10_000,
        }


class RequestPage(msgspec.Struct, frozen=True, kw_only=True):
    """``next_after`` (start and id of the last row) continues behind it; None at the end."""

    rows: list[RequestRow]
    next_after: tuple[int, str] | None


def usage_requests(
    connection: Connection,
    wanted: UsageFilter,
    *,
    limit: int = 100,
    after: tuple[int, str] | None = None,
    is_ascending: bool = False,
) -> RequestPage:
    """Requests in order of their start, the newest first unless ``is_ascending``."""
    query = _requests().where(*_conditions(wanted)).limit(limit + 1)
    keys = (_USAGE.started_at_us, _USAGE.request_id)
    query = query.order_by(*(key.asc() if is_ascending else key.desc() for key in keys))
    if after is not None:
        started, request_id = keys
        at_us, last_id = after
        further = started > at_us if is_ascending else started < at_us
        tied = request_id > last_id if is_ascending else request_id < last_id
        query = query.where(or_(further, and_(started == at_us, tied)))
    found = connection.execute(query).all()
    rows = [_row(row) for row in found[:limit]]
    next_after = (rows[-1].started_at_us, rows[-1].request_id) if len(found) > limit else None
    return RequestPage(rows=rows, next_after=next_after)


def find_request(connection: Connection, account_id: str | None, request_id: str) -> RequestRow | None:
    """One request; None when the account (any, when None) has none of this id."""
    query = _requests().where(_USAGE.request_id == request_id)
    if account_id is not None:
        query = query.where(_USAGE.account_id == account_id)
    row = connection.execute(query).one_or_none()
    return None if row is None else _row(row)


def _requests() -> Select[Any]:
    return select(
        schema.usage_records,
        *(_LEDGER[name] for name in (*_CHARGE, "neurons_e4", "rate_card_version")),
    ).join_from(schema.usage_records, schema.ledger_transactions, _LEDGER.id == _USAGE.request_id)


def _conditions(wanted: UsageFilter) -> list[ColumnElement[bool]]:
    conditions: list[ColumnElement[bool]] = []
    if wanted.account_id is not None:
        conditions.append(_USAGE.account_id == wanted.account_id)
    if wanted.period.start_us is not None:
        conditions.append(_USAGE.started_at_us >= wanted.period.start_us)
    if wanted.period.end_us is not None:
        conditions.append(_USAGE.started_at_us < wanted.period.end_us)
    if wanted.min_neurons_e4 > 0:
        conditions.append(_LEDGER.neurons_e4 >= wanted.min_neurons_e4)
    if wanted.min_prompt_tokens > 0:
        conditions.append(_USAGE.prompt_tokens >= wanted.min_prompt_tokens)
    for column, values in (
        (_USAGE.model, wanted.models),
        (_USAGE.token_id, wanted.token_ids),
        (_USAGE.session, wanted.sessions),
        (_USAGE.surface, wanted.surfaces),
        (_USAGE.status, wanted.statuses),
    ):
        if values:
            conditions.append(column.in_(values))
    return conditions


def _row(row: Row[Any]) -> RequestRow:
    values = row._mapping
    return RequestRow(**{name: values[name] for name in RequestRow.__struct_fields__})
