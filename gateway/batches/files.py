"""Files of accounts: uploaded ones, and the output of batches. Blocking; thread-safe; raises StoreError.

An uploaded file is a row and its chunks; the row comes last, so that a file is there as a whole or not at
all. The lines of a batch's output are the outputs of its items, which are written once; its files have no
chunks.
"""

from __future__ import annotations

import secrets
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import msgspec
from sqlalchemy import Row, and_, delete, func, insert, or_, select

from billing.batch_schema import file_chunks, files
from billing.store import Store
from gateway.batches.archive import BatchArchive
from gateway.batches.closing import ERROR_STATES, SUCCESS_STATES
from gateway.batches.config import BatchesConfig
from gateway.batches.jobs import Batch
from gateway.batches.outputs import lines_of
from gateway.batches.queue import QueueFullError, now_us

_MICROS = 1_000_000
_FILE, _CHUNK = files.c, file_chunks.c


class StoredFile(msgspec.Struct, frozen=True, kw_only=True):
    """A file. ``batch_id`` names the batch whose output it is; "" for an uploaded one."""

    id: str
    account_id: str
    purpose: str
    name: str
    batch_id: str
    num_bytes: int
    created_at_us: int
    expires_at_us: int


class Upload:
    """A file on its way in: :meth:`add` its pieces, then :meth:`finish`. Left alone, it is swept away."""

    def __init__(self, store: Store, file_id: str, max_bytes: int, clock: Callable[[], int]) -> None:
        self._store = store
        self._max_bytes = max_bytes
        self._clock = clock
        self._num_chunks = 0
        self.file_id = file_id
        self.num_bytes = 0

    @property
    def is_too_large(self) -> bool:
        return self.num_bytes > self._max_bytes

    def add(self, data: bytes) -> None:
        """Store the next piece; of a file that is too large, no more."""
        self.num_bytes += len(data)
        if self.is_too_large or not data:
            return
        row = {
            "file_id": self.file_id,
            "number": self._num_chunks,
            "created_at_us": self._clock(),
            "data": data,
        }
        with self._store.writing() as connection:
            connection.execute(insert(file_chunks), row)
        self._num_chunks += 1

    def discard(self) -> None:
        """Delete what was stored."""
        with self._store.writing() as connection:
            connection.execute(delete(file_chunks).where(_CHUNK.file_id == self.file_id))


class FileStore:
    """See the module. Files of other accounts do not exist."""

    def __init__(
        self, store: Store, archive: BatchArchive, config: BatchesConfig, clock: Callable[[], int] = now_us
    ) -> None:
        """``clock`` returns UTC microseconds."""
        self._store = store
        self._archive = archive
        self._config = config
        self._clock = clock

    def begin_upload(self) -> Upload:
        """A new file, which does not exist before :meth:`finish_upload`."""
        file_id = f"file-{secrets.token_hex(16)}"
        return Upload(self._store, file_id, self._config.max_file_bytes, self._clock)

    def finish_upload(self, upload: Upload, account_id: str, purpose: str, name: str) -> StoredFile:
        """Let the file exist. Raises QueueFullError when the account stores too much already."""
        now = self._clock()
        stored = StoredFile(
            id=upload.file_id,
            account_id=account_id,
            purpose=purpose,
            name="".join(filter(str.isprintable, name)),  # databases refuse some characters
            batch_id="",
            num_bytes=upload.num_bytes,
            created_at_us=now,
            expires_at_us=now + int(self._config.retention_s * _MICROS),
        )
        total = select(func.coalesce(func.sum(_FILE.num_bytes), 0)).where(_FILE.account_id == account_id)
        with self._store.writing() as connection:
            self._store.lock_name(connection, f"files of {account_id}")
            num_stored = int(connection.scalar(total) or 0)
            if num_stored + upload.num_bytes > self._config.max_stored_bytes:
                raise QueueFullError(
                    f"the account's files may hold {self._config.max_stored_bytes} bytes together; there are "
                    f"{num_stored} and {upload.num_bytes} would be added"
                )
            connection.execute(insert(files), msgspec.structs.asdict(stored))
        return stored

    def find(self, account_id: str, file_id: str) -> StoredFile | None:
        """The file, or None."""
        query = select(files).where(_FILE.id == file_id, _FILE.account_id == account_id)
        with self._store.reading() as connection:
            row = connection.execute(query).one_or_none()
        return None if row is None else _file_of(row)

    def newest(
        self, account_id: str, *, purpose: str = "", after: str = "", max_files: int
    ) -> Sequence[StoredFile]:
        """Files, newest first; ``after`` is the id of the last one that was seen."""
        query = (
            select(files)
            .where(_FILE.account_id == account_id)
            .order_by(_FILE.created_at_us.desc(), _FILE.id.desc())
            .limit(max_files)
        )
        if purpose:
            query = query.where(_FILE.purpose == purpose)
        if after:
            last = self.find(account_id, after)
            created_at_us = 0 if last is None else last.created_at_us
            query = query.where(
                or_(
                    _FILE.created_at_us < created_at_us,
                    and_(_FILE.created_at_us == created_at_us, _FILE.id < after),
                )
            )
        with self._store.reading() as connection:
            return [_file_of(row) for row in connection.execute(query)]

    def delete(self, account_id: str, file_id: str) -> bool:
        """Delete a file; False when there was none. Batches that were made of it have copies of its lines."""
        is_it = and_(_FILE.id == file_id, _FILE.account_id == account_id)
        with self._store.writing() as connection:
            has_deleted = connection.execute(delete(files).where(is_it)).rowcount > 0
            if has_deleted:
                connection.execute(delete(file_chunks).where(_CHUNK.file_id == file_id))
        return has_deleted

    def content(self, stored: StoredFile) -> Iterator[bytes]:
        """The file's bytes in pieces of moderate size."""
        if not stored.batch_id:
            return self._chunks(stored.id)
        batch = self._archive.find(stored.account_id, stored.batch_id)
        return iter(()) if batch is None else self._lines(batch, stored.id)

    def _lines(self, batch: Batch, file_id: str) -> Iterator[bytes]:
        states = ERROR_STATES if file_id == batch.error_file_id else SUCCESS_STATES
        return lines_of(batch, self._archive.all_ended_items(batch.id, states))

    def _chunks(self, file_id: str) -> Iterator[bytes]:
        number = 0
        while True:
            query = select(_CHUNK.data).where(_CHUNK.file_id == file_id, _CHUNK.number == number)
            with self._store.reading() as connection:
                data = connection.scalar(query)
            if data is None:
                return
            yield data
            number += 1


def _file_of(row: Row[Any]) -> StoredFile:
    return StoredFile(**row._mapping)
