"""The checks of an audit. Each reads one state of the database and adds what is wrong to the findings.

A further check is a function of the same form in :data:`CHECKS`.
"""

from __future__ import annotations

from collections.abc import Callable
from itertools import islice
from typing import Any, Literal

import msgspec
from sqlalchemy import Connection, Row, func, select

from billing.credits import Credit
from billing.late_cards import HOW_TO_MEND
from billing.ledger import ADJUSTMENTS, CASH, receivable, revenue
from billing.money_schema import credits_table
from billing.rates import UNPRICED, Charge, NoRateError, RateBook
from billing.receipts import newest_receipts, problems_of, receipt_of
from billing.rollups import find_drift
from billing.schema import accounts, ledger_entries, ledger_transactions, usage_records
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
    "wrong_credit",
    "wrong_rollup",
    "wrong_receipt",
    "wrong_replica_count",
    "unbilled_usage",
]

_IDS_SHOWN = 5
_ROWS_PER_FETCH = 2_000
_IDS_PER_LOOKUP = 1_000
_USAGE, _LEDGER, _ENTRY = usage_records.c, ledger_transactions.c, ledger_entries.c


class Finding(msgspec.Struct, frozen=True):
    """One thing that is wrong. ``subject`` is a request id, a model, or "" for the ledger as a whole."""

    kind: FindingKind
    subject: str
    detail: str


class ReplicaUsage(msgspec.Struct, frozen=True, kw_only=True):
    """The end of one request as a replica remembers it.

    ``is_attempt``: one that may have been in vain, for which there is then no record (an item of a batch,
    which is tried again).
    """

    replica_id: str
    request_id: str
    prompt_tokens: int
    cached_prompt_tokens: int
    completion_tokens: int
    finished_at_us: int
    is_attempt: bool = False


class AuditScope(msgspec.Struct, frozen=True, kw_only=True):
    """What an audit has at hand beside the database.

    ``spooled`` are the ids of records in the journal, ``left_behind`` those that have been there too long.
    ``replica_usages`` are what replicas remember, ``is_settled_before_us`` the time before which a request
    that ended must be on the books. At most ``max_receipts`` receipts are checked, the newest; None is all.
    """

    rate_book: RateBook
    spooled: frozenset[str] = frozenset()
    left_behind: frozenset[str] = frozenset()
    replica_usages: tuple[ReplicaUsage, ...] = ()
    is_settled_before_us: int = 0
    max_receipts: int | None = 1_000


class Findings:
    """What was found; at most ``max_listed`` are kept, all are counted."""

    def __init__(self, max_listed: int) -> None:
        self.num = 0
        self.listed: list[Finding] = []
        self._max_listed = max_listed

    def add(self, kind: FindingKind, subject: str, detail: str) -> None:
        self.num += 1
        if len(self.listed) < self._max_listed:
            self.listed.append(Finding(kind, subject, detail))


class OtherCards:
    """Records that the configured cards price by another card than the one they were billed with, by both.

    One change of a card concerns every request since its date, so these are one finding each, with a count
    and the first few request ids.
    """

    def __init__(self) -> None:
        self._nums: dict[tuple[str, str, str], int] = {}
        self._first: dict[tuple[str, str, str], list[str]] = {}

    def add(self, record: UsageRecord, billed_with: str, priced_by: str) -> None:
        """``priced_by`` "": no card is in force any more."""
        key = (record.model, billed_with, priced_by)
        self._nums[key] = self._nums.get(key, 0) + 1
        first = self._first.setdefault(key, [])
        if len(first) < _IDS_SHOWN:
            first.append(record.request_id)

    def add_to(self, findings: Findings) -> None:
        """One finding for each pair of cards; its subject is the model."""
        for (model, billed_with, priced_by), num in self._nums.items():
            now = f"card {priced_by!r} prices them now" if priced_by else "no card is in force for them now"
            first = self._first[model, billed_with, priced_by]
            findings.add(
                "wrong_price",
                model,
                f"{num} requests were billed with card {billed_with!r}, but {now} "
                f"({', '.join(first)}{', ...' if num > len(first) else ''}); {HOW_TO_MEND}",
            )


def _check_balance(connection: Connection, scope: AuditScope, findings: Findings) -> None:
    total = func.sum(_ENTRY.amount_nanos)
    by_transaction = select(_ENTRY.transaction_id, total).group_by(_ENTRY.transaction_id).having(total != 0)
    for transaction_id, amount in connection.execute(by_transaction):
        findings.add("unbalanced_transaction", transaction_id, f"its entries sum to {amount} nanos, not 0")
    overall = int(connection.scalar(select(total)) or 0)
    if overall:
        findings.add("unbalanced_ledger", "", f"all entries sum to {overall} nanos, not 0")


def _check_pairs(connection: Connection, scope: AuditScope, findings: Findings) -> None:
    """A record and a transaction for each other; primary keys rule out a second one."""
    has_transaction = select(_LEDGER.id).where(_LEDGER.id == _USAGE.request_id).exists()
    for request_id in connection.scalars(select(_USAGE.request_id).where(~has_transaction)):
        findings.add("record_without_transaction", request_id, "the usage record has no transaction")
    has_record = select(_USAGE.request_id).where(_USAGE.request_id == _LEDGER.id).exists()
    for transaction_id in connection.scalars(select(_LEDGER.id).where(_LEDGER.kind == "charge", ~has_record)):
        findings.add("transaction_without_record", transaction_id, "the transaction has no usage record")
    belongs = select(_LEDGER.id).where(_LEDGER.id == _ENTRY.transaction_id).exists()
    strays = select(_ENTRY.transaction_id).where(~belongs).distinct()
    for transaction_id in connection.scalars(strays):
        findings.add("entries_without_transaction", transaction_id, "entries of no transaction")
    known = select(accounts.c.id).where(accounts.c.id == _USAGE.account_id).exists()
    unknown = select(_USAGE.account_id, func.count()).where(~known).group_by(_USAGE.account_id)
    for account_id, num_records in connection.execute(unknown):
        findings.add("unknown_account", "", f"{num_records} usage records of account {account_id}")


def _check_records(connection: Connection, scope: AuditScope, findings: Findings) -> None:
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
    other_cards = OtherCards()
    for row in connection.execution_options(yield_per=_ROWS_PER_FETCH).execute(query):
        _check_price(row, scope.rate_book, findings, other_cards)
        found = (row.debited, row.debit_nanos, row.credited, row.credit_nanos)
        expected = (receivable(row.account_id), row.amount_nanos, revenue(row.model), -row.amount_nanos)
        if found != expected:
            findings.add("wrong_entries", row.request_id, f"entries are {found}, expected {expected}")
    other_cards.add_to(findings)
    more = select(_ENTRY.transaction_id).where(_ENTRY.leg.not_in((0, 1))).distinct()
    for transaction_id in connection.scalars(more):
        findings.add("wrong_entries", transaction_id, "has more than two entries")


def _check_price(row: Row[Any], rate_book: RateBook, findings: Findings, other_cards: OtherCards) -> None:
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
    except NoRateError:
        other_cards.add(record, row.rate_card_version, "")
        return
    if row.rate_card_version and charge.rate_card_version not in ("", row.rate_card_version):
        other_cards.add(record, row.rate_card_version, charge.rate_card_version)
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
        "free_nanos": charge.free_nanos,
        "input_nanos": lines[0],
        "cached_input_nanos": lines[1],
        "output_nanos": lines[2],
        "occurred_at_us": record.started_at_us,
    }


def _check_posted(connection: Connection, scope: AuditScope, findings: Findings) -> None:
    waiting = iter(sorted(scope.left_behind))
    while some := list(islice(waiting, _IDS_PER_LOOKUP)):
        posted = set(connection.scalars(select(_USAGE.request_id).where(_USAGE.request_id.in_(some))))
        for request_id in some:
            if request_id not in posted:
                findings.add("unposted_record", request_id, "waits in the spool; is the gateway running?")


def _check_credits(connection: Connection, scope: AuditScope, findings: Findings) -> None:
    """Each top-up and credit note has its transaction, and no request is given back more than it paid."""
    rows = connection.execute(
        select(credits_table, _LEDGER.amount_nanos.label("posted_nanos"), _LEDGER.kind.label("posted_kind"))
        .select_from(credits_table)
        .outerjoin(ledger_transactions, _LEDGER.id == credits_table.c.transaction_id)
    )
    given_back: dict[str, int] = {}
    known: set[str] = set()
    for row in rows:
        credit = Credit(**{name: row._mapping[name] for name in Credit.__struct_fields__})
        known.add(credit.transaction_id)
        if (row.posted_kind, row.posted_nanos) != (credit.kind, -credit.amount_nanos):
            findings.add("wrong_credit", credit.transaction_id, "its transaction is missing or another")
        if credit.request_id:
            given_back[credit.request_id] = given_back.get(credit.request_id, 0) + credit.amount_nanos
        _check_legs(connection, credit, findings)
    for transaction_id in connection.scalars(select(_LEDGER.id).where(_LEDGER.kind != "charge")):
        if transaction_id not in known:
            findings.add("wrong_credit", transaction_id, "a transaction that nothing explains")
    for request_id, nanos in given_back.items():
        charged = connection.scalar(select(_LEDGER.amount_nanos).where(_LEDGER.id == request_id))
        if charged is None or nanos > charged:
            findings.add("wrong_credit", request_id, f"{nanos} nanos given back of a charge of {charged}")


def _check_legs(connection: Connection, credit: Credit, findings: Findings) -> None:
    legs = {
        row.ledger_account: row.amount_nanos
        for row in connection.execute(
            select(_ENTRY.ledger_account, _ENTRY.amount_nanos).where(
                _ENTRY.transaction_id == credit.transaction_id
            )
        )
    }
    owed = legs.pop(receivable(credit.account_id), None)
    expected = CASH if credit.kind == "top_up" else ADJUSTMENTS
    is_known = len(legs) == 1 and all(
        name == expected or (credit.request_id and name.startswith("revenue:")) for name in legs
    )
    if owed != -credit.amount_nanos or not is_known:
        findings.add("wrong_credit", credit.transaction_id, "its entries do not belong to it")


def _check_rollups(connection: Connection, scope: AuditScope, findings: Findings) -> None:
    for drift in find_drift(connection):
        findings.add("wrong_rollup", "", drift)


def _check_receipts(connection: Connection, scope: AuditScope, findings: Findings) -> None:
    """The receipts that would be given are sound."""
    for row in newest_receipts(connection, scope.max_receipts):
        try:
            receipt = receipt_of(row, cache_salt="", currency=scope.rate_book.currency)
        except InvalidUsageError:
            continue  # a finding already: the record itself makes no sense
        for problem in problems_of(receipt):
            findings.add("wrong_receipt", receipt.request_id, problem)


def _check_replicas(connection: Connection, scope: AuditScope, findings: Findings) -> None:
    """What replicas counted is what was recorded, but for requests that are only just ending."""
    waiting = iter(scope.replica_usages)
    while some := list(islice(waiting, _IDS_PER_LOOKUP)):
        ids = [usage.request_id for usage in some]
        rows = connection.execute(select(usage_records).where(_USAGE.request_id.in_(ids)))
        recorded = {row.request_id: row for row in rows}
        for usage in some:
            row = recorded.get(usage.request_id)
            if row is None:
                is_settled = usage.finished_at_us < scope.is_settled_before_us
                if is_settled and not usage.is_attempt and usage.request_id not in scope.spooled:
                    findings.add("unbilled_usage", usage.request_id, f"{usage.replica_id} served it")
            elif row.replica_id == usage.replica_id and not row.is_estimated:
                _compare(row, usage, findings)


def _compare(row: Row[Any], usage: ReplicaUsage, findings: Findings) -> None:
    for name in ("prompt_tokens", "cached_prompt_tokens", "completion_tokens"):
        counted, recorded = getattr(usage, name), row._mapping[name]
        if counted != recorded:
            findings.add(
                "wrong_replica_count",
                usage.request_id,
                f"{usage.replica_id} counted {counted} {name}, the record says {recorded}",
            )


Check = Callable[[Connection, AuditScope, Findings], None]

CHECKS: tuple[Check, ...] = (
    _check_balance,
    _check_pairs,
    _check_records,
    _check_posted,
    _check_credits,
    _check_rollups,
    _check_receipts,
    _check_replicas,
)
"""All of them, in the order in which they run."""
