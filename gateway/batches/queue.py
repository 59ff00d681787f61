"""The durable queue: submit, lease, renew, end, release. Blocking; thread-safe; each call is one transaction.

Leasing takes rows that are locked by nobody (``SKIP LOCKED``) on PostgreSQL, and on SQLite relies on writing
transactions excluding each other. Whoever ends or releases an item must name the number of its lease; a lease
that was taken back has given its number up, so a late worker changes nothing.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Collection, Sequence

import msgspec
from sqlalchemy import ColumnElement, Connection, and_, bindparam, exists, func, insert, select, update

from billing.batch_schema import batch_items, batch_payloads, batches
from billing.rates import RateBook
from billing.store import Store
from gateway.batches.config import BatchesConfig
from gateway.batches.events import QUEUED, add_event, event_of
from gateway.batches.jobs import OPEN_STATES, OPEN_STATUSES, Ending, Form, Lease, NewBatch
from gateway.batches.prefixes import places_of

_MICROS = 1_000_000
_RUNNABLE_STATUSES = ("queued", "running")
_BATCH, _ITEM, _PAYLOAD = batches.c, batch_items.c, batch_payloads.c


class QueueFullError(RuntimeError):
    """The account has as much in the queue as it may; the message says what."""


class Runnable(msgspec.Struct, frozen=True, kw_only=True):
    """A batch with items that could run now."""

    id: str
    account_id: str
    model: str


class EndResult(msgspec.Struct, frozen=True, kw_only=True):
    """What :meth:`BatchQueue.end` did. ``done_batch_ids`` are batches with nothing left to run, as far as
    this transaction could see.
    """

    num_effective: int
    done_batch_ids: list[str]


def now_us() -> int:
    """UTC microseconds."""
    return time.time_ns() // 1_000


class BatchQueue:
    """See the module. All methods raise StoreError when the database does not answer."""

    def __init__(
        self, store: Store, rate_book: RateBook, config: BatchesConfig, clock: Callable[[], int] = now_us
    ) -> None:
        """``clock`` returns UTC microseconds."""
        self._store = store
        self._rate_book = rate_book
        self._config = config
        self._clock = clock

    # -- in ------------------------------------------------------------------------------------------------

    def submit(self, new: NewBatch) -> None:
        """Make a submission durable. Raises QueueFullError."""
        now = self._clock()
        places = places_of(new.items, self._config.prefix_bytes)
        item_rows = [
            _new_item_row(new.id, position, item.reference, place.group, place.rank)
            for position, (item, place) in enumerate(zip(new.items, places, strict=True))
        ]
        payload_rows = [
            {"batch_id": new.id, "position": position, "input": item.body, "output": None}
            for position, item in enumerate(new.items)
        ]
        with self._store.writing() as connection:
            if new.items:
                # Two gateways must not find the same room.
                self._store.lock_name(connection, f"batches of {new.account_id}")
                self._check_room(connection, new)
            connection.execute(insert(batches), _new_batch_row(new, now, self._config.deadline_s))
            if item_rows:
                connection.execute(insert(batch_items), item_rows)
                connection.execute(insert(batch_payloads), payload_rows)
            add_event(connection, new.id, event_of("failed") if new.problems else QUEUED, now)

    def _check_room(self, connection: Connection, new: NewBatch) -> None:
        config = self._config
        query = select(func.count(), func.coalesce(func.sum(_BATCH.num_items), 0)).where(
            _BATCH.account_id == new.account_id, _BATCH.status.in_(OPEN_STATUSES)
        )
        num_batches, num_items = connection.execute(query).one()
        if num_batches >= config.max_open_batches:
            raise QueueFullError(
                f"the account has {num_batches} batches that have not ended, the most it may"
            )
        if num_items + len(new.items) > config.max_open_items:
            raise QueueFullError(
                f"the account's batches that have not ended may hold {config.max_open_items} requests "
                f"together; there are {num_items} and {len(new.items)} would be added"
            )

    # -- out -----------------------------------------------------------------------------------------------

    def has_open(self) -> bool:
        """Whether any batch has not ended."""
        with self._store.reading() as connection:
            return connection.scalar(select(exists().where(_BATCH.status.in_(OPEN_STATUSES)))) is True

    def runnable(self, max_batches: int) -> list[Runnable]:
        """Batches with items that could run now, oldest first; at most ``max_batches``."""
        waiting = exists().where(_ITEM.batch_id == _BATCH.id, *self._is_due(self._clock()))
        query = (
            select(_BATCH.id, _BATCH.account_id, _BATCH.model)
            .where(_BATCH.status.in_(_RUNNABLE_STATUSES), _BATCH.expires_at_us > self._clock(), waiting)
            .order_by(_BATCH.created_at_us, _BATCH.id)
            .limit(max_batches)
        )
        with self._store.reading() as connection:
            return [Runnable(**row._mapping) for row in connection.execute(query)]

    def groups(self, batch_id: str, after: str, max_groups: int) -> list[str]:
        """Prefix groups of a batch with items that could run now, in order, beginning after ``after``."""
        query = (
            select(_ITEM.prefix_group)
            .where(_ITEM.batch_id == batch_id, _ITEM.prefix_group > after, *self._is_due(self._clock()))
            .distinct()
            .order_by(_ITEM.prefix_group)
            .limit(max_groups)
        )
        with self._store.reading() as connection:
            return list(connection.scalars(query))

    def lease(self, batch_id: str, group: str, owner: str, max_items: int) -> list[Lease]:
        """Lease items of one group of a batch to ``owner``, in the order of their prompts."""
        now = self._clock()
        wanted = (
            select(_ITEM.position)
            .where(_ITEM.batch_id == batch_id, _ITEM.prefix_group == group, *self._is_due(now))
            .order_by(_ITEM.sort_rank)
            .limit(max_items)
            .with_for_update(skip_locked=True)
        )
        with self._store.writing() as connection:
            batch = connection.execute(
                select(_BATCH.id).where(
                    _BATCH.id == batch_id,
                    _BATCH.status.in_(_RUNNABLE_STATUSES),
                    _BATCH.expires_at_us > now,
                )
            ).one_or_none()
            positions = [] if batch is None else list(connection.scalars(wanted))
            if not positions:
                return []
            is_wanted = and_(_ITEM.batch_id == batch_id, _ITEM.position.in_(positions))
            connection.execute(
                update(batch_items)
                .where(is_wanted)
                .values(
                    state="leased",
                    num_leases=_ITEM.num_leases + 1,
                    lease_owner=owner,
                    lease_expires_at_us=now + self._lease_us,
                )
            )
            connection.execute(
                update(batches)
                .where(_BATCH.id == batch_id, _BATCH.status == "queued")
                .values(status="running", started_at_us=now)
            )
            return _read_leases(connection, is_wanted)

    def renew(self, owner: str, held: Collection[Lease]) -> set[tuple[str, int, int]]:
        """Extend the leases in ``held`` and give back what else ``owner`` has, which nobody works at.

        Returns what it still holds, as (batch id, position, lease number); the rest of ``held`` was taken
        back and must not be worked at any more.
        """
        now = self._clock()
        keys = {(lease.batch_id, lease.position, lease.number) for lease in held}
        query = select(_ITEM.batch_id, _ITEM.position, _ITEM.num_leases).where(
            _ITEM.lease_owner == owner, _ITEM.state == "leased"
        )
        with self._store.writing() as connection:
            found = {(row.batch_id, row.position, row.num_leases) for row in connection.execute(query)}
            for is_held, some in ((True, found & keys), (False, found - keys)):
                if some:
                    values = {"lease_expires_at_us": now + self._lease_us} if is_held else _QUEUED_AGAIN
                    connection.execute(
                        update(batch_items).where(*_IS_LEASE).values(**values),
                        [_lease_key(key) for key in some],
                    )
        return found & keys

    def end(self, endings: Sequence[Ending]) -> EndResult:
        """End items: their outputs, usage records and ledger transactions become durable together.

        Those whose leases had been taken back have no effect, and nothing of them is kept.
        """
        in_order = sorted(endings, key=lambda ending: ending.lease.key)
        with self._store.writing() as connection:
            effective = [ending for ending in in_order if _end_item(connection, ending)]
            for ending in effective:
                connection.execute(
                    update(batch_payloads)
                    .where(
                        _PAYLOAD.batch_id == ending.lease.batch_id, _PAYLOAD.position == ending.lease.position
                    )
                    .values(output=ending.output)
                )
            records = [ending.record for ending in effective if ending.record is not None]
            self._store.post_within(connection, records, self._rate_book)
            done = [
                batch_id
                for batch_id in sorted({ending.lease.batch_id for ending in effective})
                if not connection.scalar(select(_has_open(batch_id)))
            ]
        return EndResult(num_effective=len(effective), done_batch_ids=done)

    def release(self, lease: Lease, *, delay_s: float, has_failed: bool) -> None:
        """Give an item back, to be tried again after ``delay_s``; ``has_failed`` counts against it."""
        key = _lease_key((lease.batch_id, lease.position, lease.number))
        values = {
            **_QUEUED_AGAIN,
            "not_before_us": self._clock() + int(delay_s * _MICROS),
            "num_failures": _ITEM.num_failures + int(has_failed),
        }
        with self._store.writing() as connection:
            connection.execute(update(batch_items).where(*_IS_LEASE).values(**values), key)

    def release_all(self, owner: str) -> int:
        """Give back everything that a predecessor under the same name had; returns how many items."""
        return self._take_back(_ITEM.lease_owner == owner)

    def reclaim_expired(self) -> int:
        """Take back the leases that have run out; returns how many items."""
        return self._take_back(_ITEM.lease_expires_at_us < self._clock())

    def _take_back(self, which: ColumnElement[bool]) -> int:
        is_taken = and_(_ITEM.state == "leased", which)
        with self._store.reading() as connection:
            if connection.scalar(select(exists().where(is_taken))) is not True:
                return 0
        values = {**_QUEUED_AGAIN, "num_failures": _ITEM.num_failures + 1}
        with self._store.writing() as connection:
            return connection.execute(update(batch_items).where(is_taken).values(**values)).rowcount

    @property
    def _lease_us(self) -> int:
        return int(self._config.lease_s * _MICROS)

    @staticmethod
    def _is_due(now: int) -> tuple[ColumnElement[bool], ...]:
        return _ITEM.state == "queued", _ITEM.not_before_us <= now


_QUEUED_AGAIN = {"state": "queued", "lease_owner": "", "lease_expires_at_us": 0}
_IS_LEASE = (
    _ITEM.batch_id == bindparam("of_batch"),
    _ITEM.position == bindparam("at_position"),
    _ITEM.num_leases == bindparam("with_number"),
    _ITEM.state == "leased",
)


def _lease_key(key: tuple[str, int, int]) -> dict[str, str | int]:
    batch_id, position, number = key
    return {"of_batch": batch_id, "at_position": position, "with_number": number}


def _end_item(connection: Connection, ending: Ending) -> bool:
    """Whether the item's lease was still good, so that it has ended now."""
    lease, record = ending.lease, ending.record
    values: dict[str, str | int] = {
        "state": "succeeded" if ending.is_success else "failed",
        "lease_owner": "",
        "lease_expires_at_us": 0,
        "request_id": lease.request_id if record is None else record.request_id,
    }
    if record is not None:
        values |= {
            "prompt_tokens": record.prompt_tokens,
            "cached_prompt_tokens": record.cached_prompt_tokens,
            "completion_tokens": record.completion_tokens,
            "reasoning_tokens": record.reasoning_tokens,
        }
    key = _lease_key((lease.batch_id, lease.position, lease.number))
    return connection.execute(update(batch_items).where(*_IS_LEASE).values(**values), key).rowcount == 1


def _has_open(batch_id: str) -> ColumnElement[bool]:
    return exists().where(_ITEM.batch_id == batch_id, _ITEM.state.in_(OPEN_STATES))


def _read_leases(connection: Connection, which: ColumnElement[bool]) -> list[Lease]:
    query = (
        select(
            _ITEM.batch_id,
            _ITEM.position,
            _ITEM.num_leases,
            _ITEM.prefix_group,
            _ITEM.num_failures,
            _ITEM.reference,
            _BATCH.account_id,
            _BATCH.token_id,
            _BATCH.form,
            _BATCH.endpoint,
            _BATCH.model,
            _BATCH.created_at_us,
            _PAYLOAD.input,
        )
        .join(batches, _BATCH.id == _ITEM.batch_id)
        .join(batch_payloads, and_(_PAYLOAD.batch_id == _ITEM.batch_id, _PAYLOAD.position == _ITEM.position))
        .where(which)
        .order_by(_ITEM.sort_rank)
    )
    return [
        Lease(
            batch_id=row.batch_id,
            position=row.position,
            number=row.num_leases,
            account_id=row.account_id,
            token_id=row.token_id,
            form=_form(row.form),
            endpoint=row.endpoint,
            model=row.model,
            prefix_group=row.prefix_group,
            num_failures=row.num_failures,
            body=row.input,
            reference=row.reference.encode(),
            created_at_us=row.created_at_us,
        )
        for row in connection.execute(query)
    ]


def _form(text: str) -> Form:
    return "native" if text == "native" else "openai"


def _new_batch_row(new: NewBatch, now: int, deadline_s: float) -> dict[str, str | int | None]:
    has_failed = bool(new.problems)
    return {
        "id": new.id,
        "account_id": new.account_id,
        "token_id": new.token_id,
        "form": new.form,
        "endpoint": new.endpoint,
        "model": new.model,
        "status": "failed" if has_failed else "queued",
        "num_items": len(new.items),
        "input_file_id": new.input_file_id,
        "output_file_id": "",
        "error_file_id": "",
        "metadata": new.metadata.decode(),
        "problems": msgspec.json.encode(new.problems).decode(),
        "created_at_us": now,
        "expires_at_us": now + int(deadline_s * _MICROS),
        "started_at_us": None,
        "cancelling_at_us": None,
        "ended_at_us": now if has_failed else None,
    }


def _new_item_row(
    batch_id: str, position: int, reference: bytes, group: str, rank: int
) -> dict[str, str | int]:
    return {
        "batch_id": batch_id,
        "position": position,
        "reference": reference.decode(),
        "state": OPEN_STATES[0],
        "prefix_group": group,
        "sort_rank": rank,
        "not_before_us": 0,
        "num_leases": 0,
        "num_failures": 0,
        "lease_owner": "",
        "lease_expires_at_us": 0,
        "request_id": "",
        "prompt_tokens": 0,
        "cached_prompt_tokens": 0,
        "completion_tokens": 0,
        "reasoning_tokens": 0,
    }
