"""Money that no request moved: prepaid credit, and credit notes for what should not have been charged.

Nothing in the ledger is ever edited. A top-up and a credit note are transactions of their own: both lower
what the account owes, one because money came in, the other because revenue is given back. An account that has
paid ahead owes less than nothing; what it has left is its balance.

Each is booked under a reference that the caller may choose, such as a payment's id: booking it again under
the same one changes nothing.
"""

from __future__ import annotations

import re
import secrets
import time
from collections.abc import Callable
from typing import Any, Literal

import msgspec
from sqlalchemy import Connection, Row, func, insert, select

from billing.accounts import AccountError
from billing.ledger import ADJUSTMENTS, CASH, Kind, LedgerEntry, Transaction, receivable, revenue
from billing.money import format_nanos
from billing.money_schema import credits_table
from billing.periods import Period
from billing.schema import accounts, ledger_entries, ledger_transactions, rollup_days, usage_records
from billing.store import Store

CreditKind = Literal["top_up", "credit_note"]

MAX_CREDIT_NANOS = 10**18
"""A billion dollars: keeps every sum within 64 bits."""

_MAX_REASON_CHARS = 500
_REFERENCE = re.compile(r"[\x21-\x7e]{1,200}", re.ASCII)
_CREDITS = credits_table.c


class CreditError(AccountError):
    """A credit that cannot be booked; the message says why."""


class Credit(msgspec.Struct, frozen=True, kw_only=True):
    """One top-up or credit note. ``request_id`` is the request that a note corrects, or "" for none."""

    transaction_id: str
    account_id: str
    kind: CreditKind
    amount_nanos: int
    reason: str
    request_id: str
    occurred_at_us: int


class Balance(msgspec.Struct, frozen=True, kw_only=True):
    """What an account has paid in, was given back and was charged; ``balance_nanos`` is what is left."""

    credited_nanos: int
    charged_nanos: int

    @property
    def balance_nanos(self) -> int:
        return self.credited_nanos - self.charged_nanos


class CreditBook:
    """Books credits. Thread-safe; a call is one database transaction. All raise StoreError."""

    def __init__(self, store: Store, clock: Callable[[], int] = lambda: time.time_ns() // 1_000) -> None:
        """``clock`` returns UTC microseconds."""
        self._store = store
        self._clock = clock

    def top_up(self, account_id: str, amount_nanos: int, reason: str, reference: str | None = None) -> Credit:
        """Credit that the account has paid for. Raises CreditError."""
        credit = self._credit("top_up", account_id, amount_nanos, reason, reference)
        with self._store.writing() as connection:
            _lock_account(connection, account_id)
            return _book(connection, credit, CASH)

    def note(
        self,
        account_id: str,
        reason: str,
        *,
        amount_nanos: int | None = None,
        request_id: str = "",
        reference: str | None = None,
    ) -> Credit:
        """Give back ``amount_nanos``, or with a request all that is left of its charge.

        Raises:
            CreditError: there is no such account or request, or it was not charged that much.
        """
        if amount_nanos is None and not request_id:
            raise CreditError("a credit note needs an amount, or the request whose charge is given back")
        with self._store.writing() as connection:
            _lock_account(connection, account_id)
            given_up = ADJUSTMENTS
            if request_id:
                given_up, left_nanos = _charge_left(connection, account_id, request_id)
                wanted = left_nanos if amount_nanos is None else amount_nanos
                credit = self._credit("credit_note", account_id, wanted, reason, reference, request_id)
                booked = _find(connection, credit.transaction_id)
                if booked is None and credit.amount_nanos > left_nanos:
                    raise CreditError(
                        f"request {request_id} has {format_nanos(left_nanos)} left to give back, "
                        f"not {format_nanos(credit.amount_nanos)}"
                    )
                if booked is not None and amount_nanos is None:
                    credit = msgspec.structs.replace(credit, amount_nanos=booked.amount_nanos)
            else:
                credit = self._credit("credit_note", account_id, amount_nanos or 0, reason, reference)
            return _book(connection, credit, given_up)

    def list_credits(self, account_id: str | None = None, period: Period = Period()) -> list[Credit]:  # noqa: B008
        """Those of an account, or all, booked within ``period``, oldest first."""
        with self._store.reading() as connection:
            return credits_in(connection, account_id, period)

    def _credit(
        self,
        kind: CreditKind,
        account_id: str,
        amount_nanos: int,
        reason: str,
        reference: str | None,
        request_id: str = "",
    ) -> Credit:
        if reference is not None and _REFERENCE.fullmatch(reference) is None:
            raise CreditError("a reference needs 1 to 200 printable ASCII characters without spaces")
        if not 0 < amount_nanos <= MAX_CREDIT_NANOS and not (request_id and amount_nanos == 0):
            raise CreditError(f"the amount {format_nanos(amount_nanos)} is not between 0 and a billion")
        if not reason or len(reason) > _MAX_REASON_CHARS or not reason.isprintable():
            raise CreditError(f"a reason needs 1 to {_MAX_REASON_CHARS} printable characters")
        return Credit(
            transaction_id=f"{kind}:{account_id}:{reference or secrets.token_hex(16)}",
            account_id=account_id,
            kind=kind,
            amount_nanos=amount_nanos,
            reason=reason,
            request_id=request_id,
            occurred_at_us=self._clock(),
        )


def credit_transaction(credit: Credit, counterpart: str) -> Transaction:
    """The transaction of a credit: the account owes less, and ``counterpart`` is debited."""
    return Transaction(
        credit.transaction_id,
        credit.kind,
        credit.occurred_at_us,
        (
            LedgerEntry(receivable(credit.account_id), -credit.amount_nanos),
            LedgerEntry(counterpart, credit.amount_nanos),
        ),
    )


def credits_in(connection: Connection, account_id: str | None, period: Period) -> list[Credit]:
    """Those of an account, or all, booked within ``period``, oldest first."""
    query = select(credits_table).order_by(_CREDITS.occurred_at_us, _CREDITS.transaction_id)
    if account_id is not None:
        query = query.where(_CREDITS.account_id == account_id)
    if period.start_us is not None:
        query = query.where(_CREDITS.occurred_at_us >= period.start_us)
    if period.end_us is not None:
        query = query.where(_CREDITS.occurred_at_us < period.end_us)
    return [Credit(**row._mapping) for row in connection.execute(query)]


def balance_before(connection: Connection, account_id: str, at_us: int | None = None) -> Balance:
    """The balance at a midnight, by the start of requests and the booking of credits; None: as of now."""
    credited = select(func.sum(_CREDITS.amount_nanos)).where(_CREDITS.account_id == account_id)
    charged = select(func.sum(rollup_days.c.amount_nanos)).where(rollup_days.c.account_id == account_id)
    if at_us is not None:
        credited = credited.where(_CREDITS.occurred_at_us < at_us)
        charged = charged.where(rollup_days.c.start_us < at_us)
    return Balance(
        credited_nanos=int(connection.scalar(credited) or 0),
        charged_nanos=int(connection.scalar(charged) or 0),
    )


def _lock_account(connection: Connection, account_id: str) -> None:
    """One credit of an account at a time. Raises CreditError when there is no such account."""
    query = select(accounts.c.id).where(accounts.c.id == account_id).with_for_update()
    if connection.scalar(query) is None:
        raise CreditError(f"there is no account {account_id!r}")


def _charge_left(connection: Connection, account_id: str, request_id: str) -> tuple[str, int]:
    """The revenue account of a request, and what of its charge has not been given back."""
    charge = connection.execute(
        select(usage_records.c.model, ledger_transactions.c.amount_nanos)
        .join(ledger_transactions, ledger_transactions.c.id == usage_records.c.request_id)
        .where(usage_records.c.request_id == request_id, usage_records.c.account_id == account_id)
    ).one_or_none()
    if charge is None:
        raise CreditError(f"account {account_id} has no request {request_id!r}")
    given_back = connection.scalar(
        select(func.sum(_CREDITS.amount_nanos)).where(_CREDITS.request_id == request_id)
    )
    return revenue(charge.model), int(charge.amount_nanos) - int(given_back or 0)


def _find(connection: Connection, transaction_id: str) -> Credit | None:
    row: Row[Any] | None = connection.execute(
        select(credits_table).where(_CREDITS.transaction_id == transaction_id)
    ).one_or_none()
    return None if row is None else Credit(**row._mapping)


def _book(connection: Connection, credit: Credit, counterpart: str) -> Credit:
    """Write the credit, or return it as it was booked under this reference before."""
    booked = _find(connection, credit.transaction_id)
    if booked is not None:
        if msgspec.structs.replace(credit, occurred_at_us=booked.occurred_at_us) != booked:
            raise CreditError(f"{credit.transaction_id} is booked already, with another amount or reason")
        return booked
    if credit.amount_nanos == 0:
        raise CreditError(f"request {credit.request_id} has nothing left to give back")
    transaction = credit_transaction(credit, counterpart)
    connection.execute(insert(ledger_transactions), _transaction_row(transaction, credit))
    connection.execute(
        insert(ledger_entries),
        [
            {"transaction_id": transaction.id, "leg": leg} | msgspec.structs.asdict(entry)
            for leg, entry in enumerate(transaction.entries)
        ],
    )
    connection.execute(insert(credits_table), msgspec.structs.asdict(credit))
    return credit


def _transaction_row(transaction: Transaction, credit: Credit) -> dict[str, int | str]:
    kind: Kind = transaction.kind
    return {
        "id": transaction.id,
        "kind": kind,
        "occurred_at_us": transaction.occurred_at_us,
        "posted_at_us": transaction.occurred_at_us,
        "input_nanos": 0,
        "cached_input_nanos": 0,
        "output_nanos": 0,
        "amount_nanos": -credit.amount_nanos,
        "undiscounted_nanos": -credit.amount_nanos,
        "neurons_e4": 0,
        "rate_card_version": "",
    }
