"""Double entry, pure: transactions whose entries sum to zero.

Positive amounts are debits, negative ones credits. A charge debits what the account owes (its receivable) and
credits the revenue of the model. One usage record makes one transaction under the record's id; a record that
costs nothing makes one too, so that "every record has exactly one transaction" needs no exception. What was
paid or given back are transactions of other kinds (:mod:`billing.credits`).
"""

from __future__ import annotations

from typing import Literal

import msgspec

from billing.rates import Charge
from billing.usage import UsageRecord

Kind = Literal["charge", "top_up", "credit_note"]

CASH = "cash"
"""The ledger account that paid money goes to."""

ADJUSTMENTS = "adjustments"
"""The ledger account of what is given back without regard to one request."""


class UnbalancedError(ValueError):
    """The entries of a transaction do not sum to zero."""


class LedgerEntry(msgspec.Struct, frozen=True):
    """One leg: ``ledger_account`` is debited (positive) or credited (negative) by ``amount_nanos``."""

    ledger_account: str
    amount_nanos: int


class Transaction(msgspec.Struct, frozen=True):
    """Legs that sum to zero. ``id`` is the request id of a charge; ``occurred_at_us`` its request's start."""

    id: str
    kind: Kind
    occurred_at_us: int
    entries: tuple[LedgerEntry, ...]

    def __post_init__(self) -> None:
        total = 0
        for entry in self.entries:
            total += entry.amount_nanos
        if total or len(self.entries) < 2:
            raise UnbalancedError(f"transaction {self.id}: {len(self.entries)} entries sum to {total}, not 0")


def receivable(account_id: str) -> str:
    """The ledger account of what ``account_id`` owes."""
    return f"receivable:{account_id}"


def revenue(model: str) -> str:
    """The ledger account of what ``model`` has earned."""
    return f"revenue:{model}"


def charge_transaction(record: UsageRecord, charge: Charge) -> Transaction:
    """The transaction of a priced record."""
    amount = charge.amount_nanos
    return Transaction(
        record.request_id,
        "charge",
        record.started_at_us,
        (
            LedgerEntry(receivable(record.account_id), amount),
            LedgerEntry(revenue(record.model), -amount),
        ),
    )
