"""What each page shows, read from one state of the database. Blocking: runs in a reader's thread."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import msgspec
from sqlalchemy import Connection, func, select

from billing import schema
from billing.accounts import OPERATOR_PERMISSION
from billing.analytics import Dimension, Order, UsageFilter, UsageGroup, usage_groups
from billing.rates import CACHED_INPUT, INPUT, OUTPUT
from billing.receipts import Receipt
from billing.savings import PriceList, savings
from billing.usage_log import RequestRow, find_request, usage_requests
from gateway.dashboard.charts import charts, latency_of, top
from gateway.dashboard.scope import Scope

View = dict[str, Any]
ReceiptFinder = Callable[[Connection, str, str], Receipt | None]
"""Account id and request id -> the receipt, unsigned."""

_DEAREST = (Order("amount_nanos", is_descending=True),)
_CLASS_NAMES = {INPUT: "Input tokens", CACHED_INPUT: "Cached input tokens", OUTPUT: "Output tokens"}
_MAX_CHOICES = 200
_NUM_TOP = 8
_MAX_ROWS = 200


class Choices(msgspec.Struct, frozen=True, kw_only=True):
    """What the filters of a page offer: pairs of value and name."""

    accounts: list[tuple[str, str]]
    models: list[str]
    tokens: list[tuple[str, str]]


def choices(connection: Connection, scope: Scope) -> Choices:
    """Accounts only for operators; tokens of the scope's account, revoked ones too."""
    accounts: list[tuple[str, str]] = []
    if scope.is_operator:
        table = schema.accounts.c
        rows = connection.execute(select(table.id, table.name).order_by(table.name).limit(_MAX_CHOICES))
        accounts = [(row.id, row.name) for row in rows]
    whole = msgspec.structs.replace(scope.wanted, models=(), token_ids=(), sessions=(), statuses=())
    models = usage_groups(connection, whole, ("model",), order=_DEAREST, limit=_MAX_CHOICES).rows
    return Choices(
        accounts=accounts,
        models=[str(row.dimensions["model"]) for row in models],
        tokens=list(token_names(connection, scope.account_id).items()),
    )


def token_names(connection: Connection, account_id: str | None) -> dict[str, str]:
    """Names of API tokens by id."""
    table = schema.api_tokens.c
    query = select(table.id, table.name).order_by(table.created_at_us).limit(_MAX_CHOICES)
    if account_id is not None:
        query = query.where(table.account_id == account_id)
    return {row.id: row.name for row in connection.execute(query)}


def account_names(connection: Connection) -> dict[str, str]:
    """Names of accounts by id."""
    table = schema.accounts.c
    return {row.id: row.name for row in connection.execute(select(table.id, table.name).limit(10_000))}


def overview(connection: Connection, scope: Scope) -> View:
    """Totals, charts, the dearest models, sessions and accounts."""
    wanted = scope.wanted
    total = usage_groups(connection, wanted).rows[0]
    models = usage_groups(connection, wanted, ("model",), order=_DEAREST, limit=_NUM_TOP).rows
    sessions = usage_groups(connection, wanted, ("session",), order=_DEAREST, limit=_NUM_TOP).rows
    view: View = {
        "total": total,
        "latency": latency_of(connection, scope),
        "charts": charts(connection, scope),
        "models": top(models, _NUM_TOP),
        "sessions": top(sessions, _NUM_TOP),
        "choices": choices(connection, scope),
    }
    if scope.is_operator and scope.account_id is None:
        rows = usage_groups(connection, wanted, ("account",), order=_DEAREST, limit=_NUM_TOP).rows
        view |= {"accounts": top(rows, _NUM_TOP), "account_names": account_names(connection)}
    return view


def usage(connection: Connection, scope: Scope, by: Dimension) -> View:
    """Tokens and money by one dimension."""
    page = usage_groups(connection, scope.wanted, (by,), order=_DEAREST, limit=_MAX_ROWS)
    names = token_names(connection, scope.account_id) if by == "token" else {}
    if by == "account":
        names = account_names(connection)
    return {
        "by": by,
        "rows": top(page.rows, _MAX_ROWS),
        "is_cut": page.next_after is not None,
        "total": usage_groups(connection, scope.wanted).rows[0],
        "names": names,
        "choices": choices(connection, scope),
    }


def requests(connection: Connection, scope: Scope, after: tuple[int, str] | None, num_rows: int) -> View:
    """Single requests, newest first."""
    page = usage_requests(connection, scope.wanted, limit=num_rows, after=after)
    return {
        "rows": page.rows,
        "next_after": page.next_after,
        "is_first": after is None,
        "tokens": token_names(connection, scope.account_id),
        "choices": choices(connection, scope),
    }


def request(connection: Connection, scope: Scope, request_id: str, receipt_for: ReceiptFinder) -> View | None:
    """One request with its receipt; None when the reader has none of this id."""
    account_id = None if OPERATOR_PERMISSION in scope.principal.permissions else scope.principal.account_id
    row = find_request(connection, account_id, request_id)
    if row is None:
        return None
    return {
        "row": row,
        "receipt": receipt_for(connection, row.account_id, request_id),
        "class_names": _CLASS_NAMES,
        "token_name": token_names(connection, row.account_id).get(row.token_id, ""),
        "account_name": account_names(connection).get(row.account_id, ""),
        "session_total": _session_total(connection, row),
    }


def saved(connection: Connection, scope: Scope, lists: Sequence[PriceList], currency: str) -> View:
    """The same usage on other price lists, without the discount, and without a cache."""
    return {
        "savings": savings(connection, scope.wanted, lists, currency=currency),
        "choices": choices(connection, scope),
    }


def replica_shares(connection: Connection, max_requests: int) -> dict[str, View]:
    """Of the newest requests: how many each replica served, and which share of their prompts was cached."""
    usage_columns = schema.usage_records.c
    newest = (
        select(
            usage_columns.replica_id,
            usage_columns.prompt_tokens,
            usage_columns.cached_prompt_tokens,
            usage_columns.completion_tokens,
        )
        .order_by(usage_columns.request_id.desc())
        .limit(max_requests)
        .subquery()
    )
    columns = newest.c
    query = select(
        columns.replica_id,
        func.count().label("num_requests"),
        func.sum(columns.prompt_tokens).label("prompt_tokens"),
        func.sum(columns.cached_prompt_tokens).label("cached_prompt_tokens"),
        func.sum(columns.completion_tokens).label("completion_tokens"),
    ).group_by(columns.replica_id)
    return {
        row.replica_id: {name: int(value) for name, value in row._mapping.items() if name != "replica_id"}
        for row in connection.execute(query)
    }


def _session_total(connection: Connection, row: RequestRow) -> UsageGroup | None:
    """What the request's session used in all."""
    if not row.session:
        return None
    wanted = UsageFilter(account_id=row.account_id, sessions=(row.session,))
    return usage_groups(connection, wanted).rows[0]
