"""Proof, at any time, that the books are right: anything that is not is a finding.

Entries of each transaction sum to zero, and so do all; each usage record has exactly one transaction and each
transaction its record; pricing the record again with the card in force at its time gives the same amounts; no
record makes no sense; nothing waits in the spool longer than a request takes; the sums that reports read are
those of the records; credits have their transactions; receipts add up; what replicas counted is what was
recorded. The database is read as of one moment, so that an audit beside a running edge finds no false drift.
The checks are in :mod:`billing.audit_checks`.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from pathlib import Path

import msgspec
from sqlalchemy import Connection, func, select

from billing.audit_checks import CHECKS, AuditScope, Finding, FindingKind, Findings, ReplicaUsage
from billing.money import format_nanos
from billing.periods import MICROS_PER_SECOND, instant_text
from billing.rates import RateBook
from billing.schema import ledger_entries, ledger_transactions, usage_records
from billing.spool import read_spooled
from billing.store import Store

__all__ = ["MAX_RECEIPTS", "AuditReport", "Finding", "FindingKind", "ReplicaUsage", "audit"]

MAX_RECEIPTS = 1_000
"""How many receipts an audit checks unless it is told otherwise."""


class AuditReport(msgspec.Struct, frozen=True, kw_only=True):
    """What was checked and what was found. At most ``max_findings`` are listed; all are counted.

    ``amount_nanos`` is what was charged, ``credited_nanos`` what was paid in or given back.
    """

    checked_at: str
    num_records: int
    num_transactions: int
    num_entries: int
    amount_nanos: int
    amount: str
    credited_nanos: int
    num_spooled: int
    num_replica_usages: int
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
    replica_usages: Sequence[ReplicaUsage] = (),
    in_flight_grace_s: float = 60.0,
    max_receipts: int | None = MAX_RECEIPTS,
    max_findings: int = 1_000,
    clock: Callable[[], int] = lambda: time.time_ns() // 1_000,
) -> AuditReport:
    """Check everything.

    Args:
        spool_directory: also look for records that were never posted; None when there is no edge here.
        replica_usages: what replicas remember of requests that ended, to be found on the books.
        in_flight_grace_s: how old a record in the spool, or the end of a request, may be before it counts as
            left behind.
        max_receipts: receipts that are built and checked, the newest; None checks all.
        clock: UTC microseconds.

    Raises:
        StoreError: the database does not answer.
    """
    now_us = clock()
    # The spool is read first: what is posted meanwhile is then in the database that is read second.
    settled_before_us = now_us - int(in_flight_grace_s * MICROS_PER_SECOND)
    spooled = {
        record.request_id: record.finished_at_us
        for record in (read_spooled(spool_directory) if spool_directory is not None else ())
    }
    scope = AuditScope(
        rate_book=rate_book,
        spooled=frozenset(spooled),
        left_behind=frozenset(
            request_id for request_id, finished_at_us in spooled.items() if finished_at_us < settled_before_us
        ),
        replica_usages=tuple(replica_usages),
        is_settled_before_us=settled_before_us,
        max_receipts=max_receipts,
    )
    findings = Findings(max_findings)
    with store.reading() as connection:
        for check in CHECKS:
            check(connection, scope, findings)
        charged, credited = (_total(connection, is_charge=is_charge) for is_charge in (True, False))
        counts = [
            int(connection.scalar(select(func.count()).select_from(table)) or 0)
            for table in (usage_records, ledger_transactions, ledger_entries)
        ]
    return AuditReport(
        checked_at=instant_text(now_us),
        num_records=counts[0],
        num_transactions=counts[1],
        num_entries=counts[2],
        amount_nanos=charged,
        amount=format_nanos(charged),
        credited_nanos=-credited,
        num_spooled=len(spooled),
        num_replica_usages=len(scope.replica_usages),
        num_findings=findings.num,
        findings=findings.listed,
    )


def _total(connection: Connection, *, is_charge: bool) -> int:
    kind = ledger_transactions.c.kind
    query = select(func.sum(ledger_transactions.c.amount_nanos))
    return int(connection.scalar(query.where(kind == "charge" if is_charge else kind != "charge")) or 0)
