"""Rate cards that reach back over requests that were billed before them.

What was charged stays charged, so such a card makes the books and the configuration disagree for good: every
audit from then on would price those requests differently. Cards begin at midnight, so the first charged
request of each account on the first day with usage since then tells; nothing else has to be read.
"""

from __future__ import annotations

from collections.abc import Iterable

import msgspec
from sqlalchemy import ColumnElement, Connection, select

from billing.periods import instant_text
from billing.rates import UNPRICED, NoRateError, RateBook, RateCard
from billing.schema import ledger_transactions, rollup_days, usage_records
from billing.usage import CHARGED_STATUSES

_MAX_ACCOUNTS = 1_000
_DAYS, _USAGE = rollup_days.c, usage_records.c

HOW_TO_MEND = (
    "amounts that were billed stay as they are: restore the card they were billed with in "
    "billing.rate_cards, and let the new one begin on a day after today"
)


class LateCard(msgspec.Struct, frozen=True, kw_only=True):
    """The first request found that was billed with ``billed_with`` and would now be priced by ``card``."""

    model: str
    card: str
    billed_with: str
    request_id: str
    started_at_us: int

    def __str__(self) -> str:
        return (
            f"the rate card {self.card!r} of {self.model} would price recorded usage differently: request "
            f"{self.request_id} of {instant_text(self.started_at_us)} was billed with {self.billed_with!r}"
        )


def late_cards(connection: Connection, rate_book: RateBook) -> list[LateCard]:
    """One for each pair of cards, the earliest first. Reads a few rows for each card."""
    found: dict[tuple[str, str, str], LateCard] = {}
    for card in rate_book.cards:
        for is_batch in (False, True):
            for late in _of_card(connection, rate_book, card, is_batch):
                found.setdefault((late.model, late.card, late.billed_with), late)
    return sorted(found.values(), key=lambda late: late.started_at_us)


def _of_card(
    connection: Connection, rate_book: RateBook, card: RateCard, is_batch: bool
) -> Iterable[LateCard]:
    which: list[ColumnElement[bool]] = [
        _DAYS.model == card.model,
        _DAYS.start_us >= card.effective_from_us,
        _DAYS.status.in_(CHARGED_STATUSES),
        (_DAYS.surface == "batch") == is_batch,
    ]
    if card.account_id:
        which.append(_DAYS.account_id == card.account_id)
    else:
        own = {each.account_id for each in rate_book.cards if each.account_id and each.model == card.model}
        which.append(_DAYS.account_id.not_in(own))
    first_us = connection.scalar(select(_DAYS.start_us).where(*which).order_by(_DAYS.start_us).limit(1))
    if first_us is None:
        return
    accounts = select(_DAYS.account_id).where(*which, _DAYS.start_us == first_us).distinct()
    for account_id in connection.scalars(accounts.limit(_MAX_ACCOUNTS)).all():
        row = connection.execute(
            select(
                _USAGE.request_id,
                _USAGE.started_at_us,
                _USAGE.surface,
                ledger_transactions.c.rate_card_version,
            )
            .join(ledger_transactions, ledger_transactions.c.id == _USAGE.request_id)
            .where(
                _USAGE.account_id == account_id,
                _USAGE.started_at_us >= first_us,
                _USAGE.model == card.model,
                _USAGE.status.in_(CHARGED_STATUSES),
                (_USAGE.surface == "batch") == is_batch,
                ledger_transactions.c.rate_card_version != UNPRICED.rate_card_version,
            )
            .order_by(_USAGE.started_at_us)
            .limit(1)
        ).first()
        if row is None:
            continue
        try:
            version = rate_book.card_for(card.model, row.started_at_us, account_id, row.surface).version
        except NoRateError:
            continue  # the account's own card ended, and no other begins before it
        if version != row.rate_card_version:
            yield LateCard(
                model=card.model,
                card=version,
                billed_with=row.rate_card_version,
                request_id=row.request_id,
                started_at_us=row.started_at_us,
            )
