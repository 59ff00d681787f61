"""Proof, at any time, that the books are right: anything that is not is a finding.

Entries of each transaction sum to zero, and so do all; each usage record has exactly one transaction and each
transaction its record; pricing the record again with the card in force at its time gives the same amounts; no
record makes no sense; nothing waits in the spool longer than a request takes. The database is read as of one
moment, so that an audit beside a running edge finds no false drift.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from itertools import islice
from pathlib import Path
from typing import Any, Literal

import msgspec
from sqlalchemy import Connection, Row, func, select

from billing.ledger import receivable, revenue
from billing.money import format_nanos
from billing.periods import MICROS_PER_SECOND, instant_text
from billing.rates import UNPRICED, Charge, NoRateError, RateBook
from billing.schema import accounts, ledger_entries, ledger_transactions, usage_records
from billing.spool import read_spooled
from billing.store import Store
from billing.usage import InvalidUsageError, UsageRecord

FindingKind = Literal[
    "unbalanced_transaction",
    "unbalanced_ledger",
    "record_without_transaction",
    "transaction_without_record",
    "entries_without_transaction",
    "wrong_entries",
    "wrong_price",
    "unpriced_record",
    "invalid_record",
    "unknown_account",
    "unposted_record",
]

_ROWS_PER_FETCH = 2_000
_IDS_PER_LOOKUP = 1_000
_USAGE, _LEDGER, _ENTRY = usage_records.c, ledger_transactions.c, ledger_entries.c


class Finding(msgspec.Struct, frozen=True):
    """One thing that is wrong. ``subject`` is a request id, or "" for the ledger as a whole."""

    kind: FindingKind
    subject: str
    detail: str


class AuditReport(msgspec.Struct, frozen=True, kw_only=True):
    """What was checked and what was found. At most ``max_findings`` are listed; all are counted."""

    checked_at: str
    num_records: int
    num_transactions: int
    num_entries: int
    amount_nanos: int
    amount: str
    num_spooled: int
    num_findings: int
    findings: list[Finding]

    @property
    def is_clean(self) -> bool:
        return self.num_findings == 0


def audit(
    store: Store,
    rate_book: RateBook,
    *,
    spool_directory: Path | None = None,
    in_flight_grace_s: float = 60.0,
    max_findings: int = 1_000,
    clock: Callable[[], int] = lambda: time.time_ns() // 1_000,
) -> AuditReport:
    """Check everything.

    Args:
        spool_directory: also look for records that were never posted; None when there is no edge here.
        in_flight_grace_s: how old a record in the spool may be before it counts as left behind.
        clock: UTC microseconds.

    Raises:
        StoreError: the database does not answer.
    """
    now_us = clock()
    # The spool is read first: what is posted meanwhile is then in the database that is read second.
    is_old_before_us = now_us - int(in_flight_grace_s * MICROS_PER_SECOND)
    spooled = [
        (record.request_id, record.finished_at_us)
        for record in (read_spooled(spool_directory) if spool_directory is not None else ())
    ]
    left = {request_id for request_id, finished_at_us in spooled if finished_at_us < is_old_before_us}
    findings = _Findings(max_findings)
    with store.reading() as connection:
        _check_balance(connection, findings)
        _check_pairs(connection, findings)
        _check_records(connection, rate_book, findings)
        _check_posted(connection, left, findings)
        amount = int(connection.scalar(select(func.sum(_LEDGER.amount_nanos))) or 0)
        counts = [
            int(connection.scalar(select(func.count()).select_from(table)) or 0)
            for table in (usage_records, ledger_transactions, ledger_entries)
        ]
    return AuditReport(
        checked_at=instant_text(now_us),
        num_records=counts[0],
        num_transactions=counts[1],
        num_entries=counts[2],
        amount_nanos=amount,
        amount=format_nanos(amount),
        num_spooled=len(spooled),
        num_findings=findings.num,
        findings=findings.listed,
    )


class _Findings:
    def __init__(self, max_listed: int) -> None:
        self.num = 0
        self.listed: list[Finding] = []
        self._max_listed = max_listed

    def add(self, kind: FindingKind, subject: str, detail: str) -> None:
        self.num += 1
        if len(self.listed) < self._max_listed:
            self.listed.append(Finding(kind, subject, detail))


def _check_balance(connection: Connection, findings: _Findings) -> None:
    total = func.sum(_ENTRY.amount_nanos)
    by_transaction = select(_ENTRY.transaction_id, total).group_by(_ENTRY.transaction_id).having(total != 0)
    for transaction_id, amount in connection.execute(by_transaction):
        findings.add("unbalanced_transaction", transaction_id, f"its entries sum to {amount} nanos, not 0")
    overall = int(connection.scalar(select(total)) or 0)
    if overall:
        findings.add("unbalanced_ledger", "", f"all entries sum to {overall} nanos, not 0")


def _check_pairs(connection: Connection, findings: _Findings) -> None:
    """A record and a transaction for each other; primary keys rule out a second one."""
    has_transaction = select(_LEDGER.id).where(_LEDGER.id == _USAGE.request_id).exists()
    for request_id in connection.scalars(select(_USAGE.request_id).where(~has_transaction)):
        findings.add("record_without_transaction", request_id, "the usage record has no transaction")
    has_record = select(_USAGE.request_id).where(_USAGE.request_id == _LEDGER.id).exists()
    for transaction_id in connection.scalars(select(_LEDGER.id).where(~has_record)):
        findings.add("transaction_without_record", transaction_id, "the transaction has no usage record")
    belongs = select(_LEDGER.id).where(_LEDGER.id == _ENTRY.transaction_id).exists()
    strays = select(_ENTRY.transaction_id).where(~belongs).distinct()
    for transaction_id in connection.scalars(strays):
        findings.add("entries_without_transaction", transaction_id, "entries of no transaction")
    known = select(accounts.c.id).where(accounts.c.id == _USAGE.account_id).exists()
    unknown = select(_USAGE.account_id, func.count()).where(~known).group_by(_USAGE.account_id)
    for account_id, num_records in connection.execute(unknown):
        findings.add("unknown_account", "", f"{num_records} usage records of account {account_id}")


def _check_records(connection: Connection, rate_book: RateBook, findings: _Findings) -> None:
    """Price every record again, and look at both legs of its transaction."""
    debit, credit = ledger_entries.alias("debit"), ledger_entries.alias("credit")
    query = (
        select(
            usage_records,
            ledger_transactions,
            debit.c.ledger_account.label("debited"),
            debit.c.amount_nanos.label("debit_nanos"),
            credit.c.ledger_account.label("credited"),
            credit.c.amount_nanos.label("credit_nanos"),
        )
        .join(ledger_transactions, _LEDGER.id == _USAGE.request_id)
        .outerjoin(debit, (debit.c.transaction_id == _LEDGER.id) & (debit.c.leg == 0))
        .outerjoin(credit, (credit.c.transaction_id == _LEDGER.id) & (credit.c.leg == 1))
    )
    for row in connection.execution_options(yield_per=_ROWS_PER_FETCH).execute(query):
        _check_price(row, rate_book, findings)
        found = (row.debited, row.debit_nanos, row.credited, row.credit_nanos)
        expected = (receivable(row.account_id), row.amount_nanos, revenue(row.model), -row.amount_nanos)
        if found != expected:
            findings.add("wrong_entries", row.request_id, f"entries are {found}, expected {expected}")
    more = select(_ENTRY.transaction_id).where(_ENTRY.leg.not_in((0, 1))).distinct()
    for transaction_id in connection.scalars(more):
        findings.add("wrong_entries", transaction_id, "has more than two entries")


def _check_price(row: Row[Any], rate_book: RateBook, findings: _Findings) -> None:
    fields = row._mapping
    try:
        record = UsageRecord(**{name: fields[name] for name in UsageRecord.__struct_fields__})
    except InvalidUsageError as error:
        findings.add("invalid_record", row.request_id, str(error))
        return
    if row.rate_card_version == UNPRICED.rate_card_version:
        findings.add("unpriced_record", record.request_id, f"no rate card of {record.model} was in force")
        return
    try:
        charge = rate_book.price(record)
    except NoRateError as error:
        findings.add("wrong_price", record.request_id, f"{error}, but one was when it was posted")
        return
    for name, expected in _expected(record, charge).items():
        if fields[name] != expected:
            findings.add(
                "wrong_price",
                record.request_id,
                f"{name} is {fields[name]!r}, pricing it again gives {expected!r}",
            )
            return


def _expected(record: UsageRecord, charge: Charge) -> dict[str, int | str]:
    """What the transaction's columns must hold, the most telling first."""
    lines = [line.amount_nanos for line in charge.lines] or [0, 0, 0]
    return {
        "rate_card_version": charge.rate_card_version,
        "amount_nanos": charge.amount_nanos,
        "undiscounted_nanos": charge.undiscounted_nanos,
        "neurons_e4": charge.neurons_e4,
        "input_nanos": lines[0],
        "cached_input_nanos": lines[1],
        "output_nanos": lines[2],
        "occurred_at_us": record.started_at_us,
    }


def _check_posted(connection: Connection, request_ids: set[str], findings: _Findings) -> None:
    waiting = iter(sorted(request_ids))
    while some := list(islice(waiting, _IDS_PER_LOOKUP)):
        posted = set(connection.scalars(select(_USAGE.request_id).where(_USAGE.request_id.in_(some))))
        for request_id in some:
            if request_id not in posted:
                findings.add("unposted_record", request_id, "waits in the spool; is the gateway running?")
