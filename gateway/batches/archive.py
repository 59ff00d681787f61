"""Reads batches: their state, counts, results and events. Blocking; thread-safe; raises StoreError."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

from sqlalchemy import ColumnElement, Connection, Row, and_, func, or_, select

from billing.batch_schema import batch_events, batch_items, batch_payloads, batches
from billing.schema import ledger_transactions
from billing.store import Store
from gateway.batches.jobs import Batch, BatchEvent, BatchUsage, ItemCounts, ItemState
from gateway.batches.outputs import EndedItem

_ROWS_PER_PAGE = 500
_BATCH, _ITEM, _PAYLOAD, _EVENT = batches.c, batch_items.c, batch_payloads.c, batch_events.c


class BatchArchive:
    """See the module. Where an account is given, batches of others do not exist."""

    def __init__(self, store: Store) -> None:
        self._store = store

    def find(self, account_id: str | None, batch_id: str) -> Batch | None:
        """The batch, or None. ``account_id`` None: whoever's it is."""
        query = select(batches).where(_BATCH.id == batch_id)
        if account_id is not None:
            query = query.where(_BATCH.account_id == account_id)
        with self._store.reading() as connection:
            row = connection.execute(query).one_or_none()
        return None if row is None else batch_of(row)

    def newest(self, account_id: str | None, *, after: str = "", max_batches: int) -> Sequence[Batch]:
        """Batches, newest first; ``after`` is the id of the last one that was seen. None: of all accounts."""
        query = select(batches).order_by(_BATCH.created_at_us.desc(), _BATCH.id.desc()).limit(max_batches)
        if account_id is not None:
            query = query.where(_BATCH.account_id == account_id)
        with self._store.reading() as connection:
            if after:
                query = query.where(_is_older_than(connection, account_id, after))
            return [batch_of(row) for row in connection.execute(query)]

    def counts(self, batch_ids: Sequence[str]) -> dict[str, ItemCounts]:
        """Items by state of each batch."""
        with self._store.reading() as connection:
            return counts_in(connection, batch_ids)

    def usage(self, batch_id: str) -> BatchUsage:
        """What the batch's items used so far."""
        names = BatchUsage.__struct_fields__
        sums = [func.coalesce(func.sum(_ITEM[name]), 0) for name in names]
        with self._store.reading() as connection:
            row = connection.execute(select(*sums).where(_ITEM.batch_id == batch_id)).one()
        return BatchUsage(**{name: int(value) for name, value in zip(names, row, strict=True)})

    def amount_nanos(self, batch_id: str) -> int:
        """What the batch's items cost so far, in nano-dollars."""
        amount = func.coalesce(func.sum(ledger_transactions.c.amount_nanos), 0)
        query = (
            select(amount)
            .join(batch_items, _ITEM.request_id == ledger_transactions.c.id)
            .where(_ITEM.batch_id == batch_id)
        )
        with self._store.reading() as connection:
            return int(connection.scalar(query) or 0)

    def events(self, batch_id: str) -> list[BatchEvent]:
        """The batch's log, oldest first."""
        query = select(batch_events).where(_EVENT.batch_id == batch_id).order_by(_EVENT.number)
        with self._store.reading() as connection:
            return [
                BatchEvent(number=row.number, type=row.type, at_us=row.at_us)
                for row in connection.execute(query)
            ]

    def ended_items(
        self, batch_id: str, states: Sequence[ItemState], after_position: int = -1
    ) -> list[EndedItem]:
        """A page of ended items in the order of their positions; empty behind the last."""
        with self._store.reading() as connection:
            return ended_items_in(connection, batch_id, states, after_position)

    def all_ended_items(self, batch_id: str, states: Sequence[ItemState]) -> Iterator[EndedItem]:
        """All of them, page by page."""
        after = -1
        while page := self.ended_items(batch_id, states, after):
            yield from page
            after = page[-1].position


def batch_of(row: Row[Any]) -> Batch:
    """A row of the table as what it means."""
    return Batch(**row._mapping)


def counts_in(connection: Connection, batch_ids: Sequence[str]) -> dict[str, ItemCounts]:
    """Items by state of each batch, within the connection's transaction."""
    query = (
        select(_ITEM.batch_id, _ITEM.state, func.count())
        .where(_ITEM.batch_id.in_(batch_ids))
        .group_by(_ITEM.batch_id, _ITEM.state)
    )
    found: dict[str, dict[str, int]] = {batch_id: {} for batch_id in batch_ids}
    for batch_id, state, count in connection.execute(query):
        found[batch_id][state] = count
    return {batch_id: ItemCounts(**counts) for batch_id, counts in found.items()}


def ended_items_in(
    connection: Connection, batch_id: str, states: Sequence[ItemState], after_position: int
) -> list[EndedItem]:
    """A page of ended items, within the connection's transaction."""
    query = (
        select(_ITEM.position, _ITEM.reference, _ITEM.state, _PAYLOAD.output)
        .join(batch_payloads, and_(_PAYLOAD.batch_id == _ITEM.batch_id, _PAYLOAD.position == _ITEM.position))
        .where(_ITEM.batch_id == batch_id, _ITEM.state.in_(states), _ITEM.position > after_position)
        .order_by(_ITEM.position)
        .limit(_ROWS_PER_PAGE)
    )
    return [
        EndedItem(position=row.position, reference=row.reference.encode(), state=row.state, output=row.output)
        for row in connection.execute(query)
    ]


def _is_older_than(connection: Connection, account_id: str | None, after: str) -> ColumnElement[bool]:
    """A batch that does not exist is older than nothing, so that the list ends."""
    query = select(_BATCH.created_at_us).where(_BATCH.id == after)
    if account_id is not None:
        query = query.where(_BATCH.account_id == account_id)
    created_at_us = connection.scalar(query) or 0
    return or_(
        _BATCH.created_at_us < created_at_us,
        and_(_BATCH.created_at_us == created_at_us, _BATCH.id < after),
    )
