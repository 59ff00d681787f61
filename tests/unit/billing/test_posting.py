from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

import pytest

from billing.audit import audit
from billing.config import SpoolConfig
from billing.posting import Poster
from billing.rates import RateBook
from billing.segments import list_segments
from billing.spool import Spool
from billing.store import PostResult, Store, StoreError
from billing.usage import UsageRecord
from tests.support.ledger import groups_of, record, records

FAST = SpoolConfig(post_interval_s=0.001, retry_max_s=0.02, max_segment_bytes=20_000, max_post_batch=20)


class FlakyStore(Store):
    """Fails a number of times: before writing anything, or after the commit, as a lost connection would."""

    before = 0
    after = 0

    def post(self, records: Sequence[UsageRecord], rate_book: RateBook) -> PostResult:
        if self.before:
            self.before -= 1
            raise StoreError("the database failed: connection refused")
        result = super().post(records, rate_book)
        if self.after:
            self.after -= 1
            raise StoreError("the database failed: connection lost")
        return result


@pytest.fixture
def spool(tmp_path: Path) -> Iterator[Spool]:
    opened = Spool(tmp_path / "spool", FAST)
    yield opened
    opened.close()


@pytest.fixture
def flaky(ledger_url: str) -> Iterator[FlakyStore]:
    store = FlakyStore.open(ledger_url)
    assert isinstance(store, FlakyStore)
    yield store
    store.close()


def until(condition: Callable[[], bool], timeout_s: float = 10.0) -> None:
    deadline = time.monotonic() + timeout_s
    while not condition():
        assert time.monotonic() < deadline, "it did not happen in time"
        time.sleep(0.002)


def ids(items: Sequence[UsageRecord]) -> set[str]:
    return {item.request_id for item in items}


def test_one_batch_at_a_time(spool: Spool, store: Store, rate_book: RateBook) -> None:
    given = records(50)
    for group in groups_of(given, 10):
        spool.append(group)
    poster = Poster(spool, store, rate_book)
    assert poster.post_once() == 20
    assert spool.num_unposted == 30
    assert poster.drain() == 30
    assert poster.post_once() == 0
    assert store.has_record(ids(given)) == ids(given)


def test_the_thread_posts_what_is_appended(spool: Spool, store: Store, rate_book: RateBook) -> None:
    poster = Poster(spool, store, rate_book)
    poster.start()
    given = records(200)
    for group in groups_of(given, 3):
        spool.append(group)
    until(lambda: spool.num_unposted == 0)
    assert poster.stop() == 0
    assert store.has_record(ids(given)) == ids(given)
    assert poster.error is None


def test_a_start_posts_what_a_killed_process_left(tmp_path: Path, store: Store, rate_book: RateBook) -> None:
    given = records(60)
    killed = Spool(tmp_path / "spool", FAST)
    for group in groups_of(given, 6):
        killed.append(group)
    half_posted = killed.read_batch(20)
    assert half_posted is not None
    store.post(half_posted.records, rate_book)  # and never marked
    killed.close()

    successor = Spool(tmp_path / "spool", FAST)
    poster = Poster(successor, store, rate_book)
    poster.start()
    assert poster.stop() == 0
    successor.close()
    assert list_segments(tmp_path / "spool") == []
    report = audit(store, rate_book, spool_directory=tmp_path / "spool")
    assert (report.num_records, report.num_transactions, report.findings) == (60, 60, [])


@pytest.mark.parametrize("when", ["before", "after"])
def test_an_outage_loses_and_doubles_nothing(
    spool: Spool, flaky: FlakyStore, rate_book: RateBook, when: str, caplog: pytest.LogCaptureFixture
) -> None:
    setattr(flaky, when, 4)
    poster = Poster(spool, flaky, rate_book)
    given = records(30)
    with caplog.at_level(logging.WARNING, logger="billing.posting"):
        poster.start()
        spool.append(given)
        until(lambda: spool.num_unposted == 0)
        poster.stop()
    messages = [entry.getMessage() for entry in caplog.records]
    assert sum("30 usage records wait in the spool" in message for message in messages) == 4
    assert messages[-1] == "the database answers again"
    report = audit(flaky, rate_book)
    assert (report.num_records, report.findings) == (30, [])


def test_stopping_during_an_outage_keeps_the_records(
    spool: Spool, flaky: FlakyStore, rate_book: RateBook, caplog: pytest.LogCaptureFixture
) -> None:
    flaky.before = 1_000_000
    poster = Poster(spool, flaky, rate_book)
    spool.append(records(5))
    with caplog.at_level(logging.WARNING, logger="billing.posting"):
        poster.start()
        until(lambda: flaky.before < 1_000_000)
        assert poster.stop() == 5
    assert "the next start posts 5 usage records" in caplog.text


def test_two_posters_of_the_same_records_post_them_once(
    tmp_path: Path, store: Store, rate_book: RateBook
) -> None:
    given = records(120)
    posters = []
    for name in ("a", "b"):
        spool = Spool(tmp_path / name, FAST)
        for group in groups_of(given, 7):
            spool.append(group)
        posters.append((spool, Poster(spool, store, rate_book)))
    for _, poster in posters:
        poster.start()
    for spool, poster in posters:
        assert poster.stop() == 0
        spool.close()
    report = audit(store, rate_book)
    assert (report.num_records, report.num_entries, report.findings) == (120, 240, [])


def test_records_without_a_card_are_said_loudly(
    spool: Spool, store: Store, rate_book: RateBook, caplog: pytest.LogCaptureFixture
) -> None:
    spool.append([record(model="@cf/unknown")])
    assert Poster(spool, store, rate_book).post_once() == 1
    assert "1 usage records had no rate card in force" in caplog.text


def test_a_fault_ends_the_thread_and_says_why(
    spool: Spool, store: Store, rate_book: RateBook, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(threading, "excepthook", lambda args: None)
    poster = Poster(spool, store, rate_book)
    spool.append(records(2))
    segment = list_segments(spool.directory)[0][1]
    segment.write_bytes(segment.read_bytes()[:30] + bytes(500))
    poster.start()
    until(lambda: poster.error is not None)
    assert "after it was written" in str(poster.error)
    assert poster.stop() == 2


def test_many_appenders_one_poster(spool: Spool, store: Store, rate_book: RateBook) -> None:
    poster = Poster(spool, store, rate_book)
    poster.start()

    def append(first: int) -> None:
        for number in range(first, first + 30):
            spool.append([record(number)])

    threads = [threading.Thread(target=append, args=(100 * number,)) for number in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert poster.stop() == 0
    report = audit(store, rate_book)
    assert (report.num_records, report.findings) == (120, [])


def test_a_database_that_is_away_at_the_start_gets_everything_later(
    tmp_path: Path, spool: Spool, rate_book: RateBook
) -> None:
    path = tmp_path / "ledger.db"
    path.mkdir()  # in the way: nothing can be opened there
    given = records(30)
    spool.append(given)
    store = Store.open(f"sqlite:///{path}", may_be_away=True)
    poster = Poster(spool, store, rate_book)
    poster.start()
    until(lambda: poster.is_away)
    path.rmdir()
    until(lambda: spool.num_unposted == 0)
    until(lambda: not poster.is_away)
    assert poster.stop() == 0
    assert store.has_record(ids(given)) == ids(given)
    store.close()
