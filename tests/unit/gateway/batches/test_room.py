"""What an account may have at most holds when several gateways take submissions at once, on either store."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from gateway.batches.config import BatchesConfig
from gateway.batches.files import Upload
from gateway.batches.queue import QueueFullError
from tests.support.batches import Clock, Office, chat_item, new_batch
from tests.support.databases import STORES, Databases
from tests.support.ledger import ACCOUNT, opened, prepare

NUM_GATEWAYS = 4
MAX_BATCHES = 5


@pytest.fixture(params=STORES)
def offices(request: pytest.FixtureRequest, tmp_path: Path, config: BatchesConfig) -> Iterator[list[Office]]:
    """Several gateways on one database."""
    databases: Databases = request.getfixturevalue(f"{request.param}_databases")
    with databases.copies_of("ledger", prepare)(tmp_path) as url:
        stores = [opened(url) for _ in range(NUM_GATEWAYS)]
        clock = Clock()
        yield [Office.on(store.__enter__(), config, clock) for store in stores]
        for store in stores:
            store.__exit__(None, None, None)


def test_no_two_find_the_same_room_for_a_batch(offices: list[Office]) -> None:
    together = threading.Barrier(NUM_GATEWAYS)

    def submit(number: int) -> int:
        num_taken = 0
        for turn in range(MAX_BATCHES):
            together.wait(30)
            try:
                offices[number].queue.submit(new_batch(f"b-{number}-{turn}", [chat_item("a question")]))
                num_taken += 1
            except QueueFullError:
                pass
        return num_taken

    with ThreadPoolExecutor(NUM_GATEWAYS) as threads:
        assert sum(threads.map(submit, range(NUM_GATEWAYS))) == MAX_BATCHES


def test_no_two_find_the_same_room_for_a_file(offices: list[Office]) -> None:
    together = threading.Barrier(NUM_GATEWAYS)

    def store(number: int) -> int:
        office, num_stored = offices[number], 0
        for turn in range(3):
            together.wait(30)
            try:
                upload = Upload(office.store, f"file-{number}-{turn}", 1_000, office.clock)
                upload.num_bytes = 300
                office.files.finish_upload(upload, ACCOUNT, "batch", "name")
                num_stored += 1
            except QueueFullError:
                pass
        return num_stored

    with ThreadPoolExecutor(NUM_GATEWAYS) as threads:
        assert sum(threads.map(store, range(NUM_GATEWAYS))) == 3
