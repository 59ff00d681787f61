"""Uploaded files."""

from __future__ import annotations

import pytest

from gateway.batches.files import StoredFile
from gateway.batches.queue import QueueFullError
from tests.support.batches import Office
from tests.support.ledger import ACCOUNT, OTHER_ACCOUNT


def upload(office: Office, *pieces: bytes, name: str = "input.jsonl") -> StoredFile:
    upload = office.files.begin_upload()
    for piece in pieces:
        upload.add(piece)
    return office.files.finish_upload(upload, ACCOUNT, "batch", name)


def test_a_file_comes_out_as_it_went_in(office: Office) -> None:
    stored = upload(office, b"one\n", b"", b"two\n", b"three")
    assert stored.num_bytes == 13
    assert b"".join(office.files.content(stored)) == b"one\ntwo\nthree"
    assert office.files.find(ACCOUNT, stored.id) == stored
    assert office.files.find(OTHER_ACCOUNT, stored.id) is None


def test_a_file_is_not_there_before_it_is_whole(office: Office) -> None:
    begun = office.files.begin_upload()
    begun.add(b"half")
    assert office.files.newest(ACCOUNT, max_files=10) == []
    begun.discard()


def test_the_newest_come_first_and_pages_end(office: Office) -> None:
    ids = []
    for number in range(5):
        office.clock.sleep(1)
        ids.append(upload(office, b"x", name=f"{number}.jsonl").id)
    first = office.files.newest(ACCOUNT, max_files=3)
    rest = office.files.newest(ACCOUNT, max_files=3, after=first[-1].id)
    assert [stored.id for stored in (*first, *rest)] == ids[::-1]
    assert office.files.newest(ACCOUNT, max_files=3, after=ids[0]) == []
    assert office.files.newest(ACCOUNT, max_files=3, after="unknown") == []
    assert office.files.newest(ACCOUNT, purpose="other", max_files=3) == []


def test_an_account_may_store_so_much(office: Office) -> None:
    upload(office, b"x" * 900)
    with pytest.raises(QueueFullError, match="1000 bytes"):
        upload(office, b"x" * 101)
    upload(office, b"x" * 100)


def test_deleting_is_for_the_owner(office: Office) -> None:
    stored = upload(office, b"x")
    assert office.files.delete(OTHER_ACCOUNT, stored.id) is False
    assert office.files.delete(ACCOUNT, stored.id) is True
    assert office.files.delete(ACCOUNT, stored.id) is False
    assert list(office.files.content(stored)) == []


def test_names_hold_nothing_that_a_database_refuses(office: Office) -> None:
    assert upload(office, b"x", name="a\x00b\n.jsonl").name == "ab.jsonl"
