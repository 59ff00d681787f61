"""Budgets: what an account, or one API token of it, may spend in a day, a month, altogether, or on credit.

A budget is a limit on what the ledger charges within a window: a UTC day, a UTC month, all time from a moment
on, or as far as prepaid credit reaches. What has been spent is never stored beside the ledger; it is read
from its sums.

Several gateways share a budget by leases. A gateway may let requests in for as much as it *holds* of a
window, and for every budget, at any time,

    charged by the ledger + sum of what all gateways hold  <=  limit

which :meth:`BudgetBook.lease` keeps by taking one lease at a time. A gateway holds what it has reserved, what
it has settled and the ledger does not have yet, and some room for requests to come. A lease that is not
renewed runs out, so that a gateway that is gone for good gives its room back.
"""

from __future__ import annotations

import secrets
import time
from collections.abc import Callable, Collection, Mapping, Sequence
from typing import Any, Literal, get_args

import msgspec
from sqlalchemy import ColumnElement, Connection, Row, and_, delete, func, insert, or_, select, update

from billing.accounts import AccountError
from billing.credits import MAX_CREDIT_NANOS
from billing.money_schema import budget_leases, budgets, credits_table
from billing.periods import MICROS_PER_DAY, MICROS_PER_SECOND, Period, month_period, month_text
from billing.schema import (
    accounts,
    api_tokens,
    ledger_transactions,
    rollup_days,
    rollup_quarters,
    usage_records,
)
from billing.store import Store

BudgetPeriod = Literal["daily", "monthly", "total", "credit"]
BudgetAction = Literal["hard", "warn"]

PERIODS: tuple[BudgetPeriod, ...] = get_args(BudgetPeriod)
ACTIONS: tuple[BudgetAction, ...] = get_args(BudgetAction)

MICROS_PER_QUARTER = 900 * MICROS_PER_SECOND
_MAX_IDS_PER_QUERY = 500
_BUDGET, _LEASE = budgets.c, budget_leases.c


class BudgetError(AccountError):
    """A budget that cannot be set or found; the message says why."""


class Budget(msgspec.Struct, frozen=True, kw_only=True):
    """A limit. ``token_id`` "" covers the whole account; ``since_us`` is where a total begins to count.

    With period "credit" the limit is the account's prepaid credit and ``limit_nanos`` comes on top: 0, or how
    far the account may go below nothing.
    """

    id: str
    account_id: str
    token_id: str
    period: BudgetPeriod
    action: BudgetAction
    limit_nanos: int
    since_us: int
    created_at_us: int

    def window(self, at_us: int) -> Period:
        """The half-open window that ``at_us`` falls in; a total and a credit have no end."""
        if self.period == "daily":
            start_us = at_us - at_us % MICROS_PER_DAY
            return Period(start_us, start_us + MICROS_PER_DAY)
        if self.period == "monthly":
            return month_period(month_text(at_us))
        return Period(self.since_us, None)


class BudgetState(msgspec.Struct, frozen=True, kw_only=True):
    """A budget as the books stand: what was charged in the present window, and its whole limit."""

    budget: Budget
    window: Period
    limit_nanos: int
    charged_nanos: int
    held_nanos: int

    @property
    def left_nanos(self) -> int:
        return self.limit_nanos - self.charged_nanos


class Lease(msgspec.Struct, frozen=True, kw_only=True):
    """What one gateway may spend of a window beyond what the ledger has charged.

    ``posted`` are those of the requests asked about that the ledger has, as of the same moment.
    ``others_nanos`` is what other gateways hold.
    """

    limit_nanos: int
    charged_nanos: int
    held_nanos: int
    others_nanos: int
    num_others: int
    posted: frozenset[str]


class BudgetBook:
    """Budgets in the store. Thread-safe; a call is one database transaction. All raise StoreError."""

    def __init__(self, store: Store, clock: Callable[[], int] = lambda: time.time_ns() // 1_000) -> None:
        """``clock`` returns UTC microseconds."""
        self._store = store
        self._clock = clock

    def set_budget(
        self,
        account_id: str,
        period: BudgetPeriod,
        limit_nanos: int,
        *,
        token_id: str = "",
        action: BudgetAction = "hard",
        since_us: int | None = None,
    ) -> Budget:
        """Set the budget of an account or token and a period, or change it. Raises BudgetError."""
        now_us = self._clock()
        if not 0 <= limit_nanos <= MAX_CREDIT_NANOS:
            raise BudgetError("the limit is not between 0 and a billion")
        if period == "credit" and token_id:
            raise BudgetError("prepaid credit belongs to a whole account, not to one token")
        is_of = and_(_BUDGET.account_id == account_id, _BUDGET.token_id == token_id, _BUDGET.period == period)
        with self._store.writing() as connection:
            _check_scope(connection, account_id, token_id)
            known = connection.execute(select(budgets).where(is_of).with_for_update()).one_or_none()
            budget = Budget(
                id=secrets.token_hex(8) if known is None else known.id,
                account_id=account_id,
                token_id=token_id,
                period=period,
                action=action,
                limit_nanos=limit_nanos,
                since_us=_since_us(period, since_us, now_us if known is None else known.since_us),
                created_at_us=now_us if known is None else known.created_at_us,
            )
            values = msgspec.structs.asdict(budget)
            if known is None:
                connection.execute(insert(budgets), values)
            else:
                connection.execute(update(budgets).where(_BUDGET.id == budget.id), values)
        return budget

    def remove(self, budget_id: str) -> Budget:
        """Lift a limit. Raises BudgetError: there is none of this id."""
        with self._store.writing() as connection:
            row = connection.execute(select(budgets).where(_BUDGET.id == budget_id)).one_or_none()
            if row is None:
                raise BudgetError(f"there is no budget with id {budget_id!r}")
            connection.execute(delete(budget_leases).where(_LEASE.budget_id == budget_id))
            connection.execute(delete(budgets).where(_BUDGET.id == budget_id))
        return _budget(row)

    def list_budgets(self, account_id: str | None = None) -> list[Budget]:
        """Those of an account, or all, oldest first."""
        query = select(budgets).order_by(_BUDGET.created_at_us, _BUDGET.id)
        if account_id is not None:
            query = query.where(_BUDGET.account_id == account_id)
        with self._store.reading() as connection:
            return [_budget(row) for row in connection.execute(query)]

    def states(self, account_id: str | None = None) -> list[BudgetState]:
        """How far each budget is spent, from one state of the database."""
        now_us = self._clock()
        query = select(budgets).order_by(_BUDGET.created_at_us, _BUDGET.id)
        if account_id is not None:
            query = query.where(_BUDGET.account_id == account_id)
        with self._store.reading() as connection:
            return [_state(connection, _budget(row), now_us) for row in connection.execute(query).all()]

    def lease(
        self,
        budget: Budget,
        window: Period,
        gateway_id: str,
        *,
        used_nanos: int,
        pending: Mapping[str, int],
        expires_after_us: int,
    ) -> Lease:
        """Renew what ``gateway_id`` holds of a window, and learn what the ledger has.

        Args:
            used_nanos: what it must hold for requests that run there, and may come to run meanwhile.
            pending: what requests cost that were settled there and may not be in the ledger yet.
            expires_after_us: how long the lease lasts without being renewed.
        """
        start_us = window.start_us or 0
        now_us = self._clock()
        with self._store.writing() as connection:
            locked = select(_BUDGET.id).where(_BUDGET.id == budget.id).with_for_update()
            is_there = connection.scalar(locked) is not None
            limit = limit_nanos(connection, budget)
            posted = _posted_among(connection, pending)  # before the sum: what is posted between counts twice
            charged = charged_nanos(connection, budget.account_id, budget.token_id, window)
            others, num_others = _held_by_others(connection, budget.id, start_us, gateway_id, now_us)
            committed = used_nanos + sum(nanos for each, nanos in pending.items() if each not in posted)
            left = max(limit - charged - others - committed, 0)
            held = committed + room_of(left, num_others)
            if is_there:
                _write_lease(connection, budget.id, start_us, gateway_id, held, now_us + expires_after_us)
        return Lease(
            limit_nanos=limit,
            charged_nanos=charged,
            held_nanos=held,
            others_nanos=others,
            num_others=num_others,
            posted=frozenset(posted),
        )

    def release(self, gateway_id: str) -> None:
        """Give back all that a gateway holds: it has stopped, and everything it settled is in the ledger."""
        with self._store.writing() as connection:
            connection.execute(delete(budget_leases).where(_LEASE.gateway_id == gateway_id))


def room_of(left_nanos: int, num_others: int) -> int:
    """What a gateway holds for requests to come: all that is left when it is alone, or half its share."""
    return left_nanos if num_others == 0 else left_nanos // (2 * (num_others + 1))


def limit_nanos(connection: Connection, budget: Budget) -> int:
    """The whole limit: of a credit budget, what was paid in and given back, and the allowance on top."""
    if budget.period != "credit":
        return budget.limit_nanos
    credited = select(func.sum(credits_table.c.amount_nanos)).where(
        credits_table.c.account_id == budget.account_id
    )
    return budget.limit_nanos + int(connection.scalar(credited) or 0)


def charged_nanos(connection: Connection, account_id: str, token_id: str, window: Period) -> int:
    """What requests that started within the window were charged, by the ledger.

    Whole days are read from the days' sums, the rest of the quarter-hours', and what is less than a
    quarter-hour (only where a total begins) from the records.
    """
    start_us = window.start_us or 0
    first_quarter = -(-start_us // MICROS_PER_QUARTER) * MICROS_PER_QUARTER
    first_day = -(-start_us // MICROS_PER_DAY) * MICROS_PER_DAY
    end_us = window.end_us
    total = _sum_of(connection, rollup_days.c, account_id, token_id, first_day, end_us)
    if first_quarter < first_day:
        total += _sum_of(connection, rollup_quarters.c, account_id, token_id, first_quarter, first_day)
    if start_us < first_quarter:
        usage = usage_records.c
        conditions: list[ColumnElement[bool]] = [
            usage.account_id == account_id,
            usage.started_at_us >= start_us,
            usage.started_at_us < first_quarter,
        ]
        if token_id:
            conditions.append(usage.token_id == token_id)
        query = (
            select(func.sum(ledger_transactions.c.amount_nanos))
            .select_from(usage_records)
            .join(ledger_transactions, ledger_transactions.c.id == usage.request_id)
            .where(*conditions)
        )
        total += int(connection.scalar(query) or 0)
    return total


def _sum_of(
    connection: Connection, sums: Any, account_id: str, token_id: str, start_us: int, end_us: int | None
) -> int:
    query = select(func.sum(sums.amount_nanos)).where(
        sums.account_id == account_id, sums.start_us >= start_us
    )
    if end_us is not None:
        query = query.where(sums.start_us < end_us)
    if token_id:
        query = query.where(sums.token_id == token_id)
    return int(connection.scalar(query) or 0)


def _posted_among(connection: Connection, request_ids: Collection[str]) -> set[str]:
    posted: set[str] = set()
    waiting: Sequence[str] = list(request_ids)
    column = usage_records.c.request_id
    for start in range(0, len(waiting), _MAX_IDS_PER_QUERY):
        some = waiting[start : start + _MAX_IDS_PER_QUERY]
        posted.update(connection.scalars(select(column).where(column.in_(some))))
    return posted


def _held_by_others(
    connection: Connection, budget_id: str, start_us: int, gateway_id: str, now_us: int
) -> tuple[int, int]:
    row = connection.execute(
        select(func.coalesce(func.sum(_LEASE.held_nanos), 0), func.count()).where(
            _LEASE.budget_id == budget_id,
            _LEASE.window_start_us == start_us,
            _LEASE.gateway_id != gateway_id,
            _LEASE.expires_at_us > now_us,
        )
    ).one()
    return int(row[0]), int(row[1])


def _write_lease(
    connection: Connection, budget_id: str, start_us: int, gateway_id: str, held: int, expires_at_us: int
) -> None:
    """In place of what the gateway held of this budget before, and of leases that have run out."""
    is_stale = or_(
        _LEASE.gateway_id == gateway_id,
        and_(_LEASE.window_start_us < start_us, _LEASE.expires_at_us <= expires_at_us),
    )
    connection.execute(delete(budget_leases).where(_LEASE.budget_id == budget_id, is_stale))
    connection.execute(
        insert(budget_leases),
        {
            "budget_id": budget_id,
            "window_start_us": start_us,
            "gateway_id": gateway_id,
            "held_nanos": held,
            "expires_at_us": expires_at_us,
        },
    )


def _state(connection: Connection, budget: Budget, now_us: int) -> BudgetState:
    window = budget.window(now_us)
    held = select(func.sum(_LEASE.held_nanos)).where(
        _LEASE.budget_id == budget.id,
        _LEASE.window_start_us == (window.start_us or 0),
        _LEASE.expires_at_us > now_us,
    )
    return BudgetState(
        budget=budget,
        window=window,
        limit_nanos=limit_nanos(connection, budget),
        charged_nanos=charged_nanos(connection, budget.account_id, budget.token_id, window),
        held_nanos=int(connection.scalar(held) or 0),
    )


def _since_us(period: BudgetPeriod, since_us: int | None, default_us: int) -> int:
    if period == "credit":
        return 0
    return default_us if since_us is None else since_us


def _check_scope(connection: Connection, account_id: str, token_id: str) -> None:
    # Locked, because two at once would both find no budget yet.
    account = select(accounts.c.id).where(accounts.c.id == account_id).with_for_update()
    if connection.scalar(account) is None:
        raise BudgetError(f"there is no account {account_id!r}")
    if token_id:
        owner = connection.scalar(select(api_tokens.c.account_id).where(api_tokens.c.id == token_id))
        if owner != account_id:
            raise BudgetError(f"account {account_id} has no API token with id {token_id!r}")


def _budget(row: Row[Any]) -> Budget:
    return Budget(**row._mapping)
