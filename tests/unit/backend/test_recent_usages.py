"""A gap-free run of the newest endings, bounded by count and by age, read in pages."""

from __future__ import annotations

from backend.recent_usages import MAX_PAGE, RecentUsageLog
from backend.wire import TokenUsage

USAGE = TokenUsage.of(prompt=3, completion=2, cached=1)


class Clock:
    def __init__(self) -> None:
        self.now = 1000.0

    def __call__(self) -> float:
        return self.now


def log_with(count: int, *, max_entries: int = 10_000, clock: Clock | None = None) -> RecentUsageLog:
    log = RecentUsageLog("r", max_entries=max_entries, ttl_s=60, clock=clock or Clock())
    for number in range(count):
        log.record(f"q{number}", "context", USAGE, "stop")
    return log


def sequences(log: RecentUsageLog, after: int) -> list[int]:
    return [entry.sequence for entry in log.page(after).usages]


def test_sequences_rise_by_one_from_one() -> None:
    assert sequences(log_with(4), 0) == [1, 2, 3, 4]


def test_a_page_begins_after_the_given_sequence() -> None:
    log = log_with(4)
    assert sequences(log, 2) == [3, 4]
    assert log.page(2).next_after == 4


def test_an_empty_page_keeps_the_place() -> None:
    log = log_with(4)
    assert log.page(4).next_after == 4
    assert log.page(99).usages == []
    assert log.page(99).next_after == 99


def test_pages_are_bounded_and_together_hold_everything() -> None:
    log = log_with(MAX_PAGE * 2 + 5)
    seen: list[int] = []
    after = 0
    while usages := log.page(after).usages:
        assert len(usages) <= MAX_PAGE
        seen += [entry.sequence for entry in usages]
        after = log.page(after).next_after
    assert seen == list(range(1, MAX_PAGE * 2 + 6))


def test_the_oldest_leave_when_there_are_too_many() -> None:
    log = log_with(10, max_entries=3)
    assert sequences(log, 0) == [8, 9, 10]
    assert sequences(log, 8) == [9, 10]


def test_the_oldest_leave_when_they_are_too_old() -> None:
    clock = Clock()
    log = log_with(2, clock=clock)
    clock.now += 61
    log.record("late", "context", USAGE, "abort")
    assert sequences(log, 0) == [3]
    clock.now += 61
    assert sequences(log, 0) == []


def test_an_ending_is_found_by_its_request() -> None:
    log = log_with(3)
    found = log.find("q1")
    assert found is not None
    assert (found.sequence, found.usage, found.billing_context) == (2, USAGE, "context")
    assert log.find("q9") is None


def test_what_has_left_is_not_found_and_a_newer_ending_of_the_same_request_is() -> None:
    log = log_with(2, max_entries=2)
    log.record("q0", "again", USAGE, "abort")
    assert log.find("q0") is not None
    log.record("q3", "context", USAGE, "stop")
    found = log.find("q0")
    assert found is not None
    assert found.billing_context == "again"
    assert log.find("q1") is None


def test_a_restart_is_told_by_its_start_time() -> None:
    clock = Clock()
    log = log_with(1, clock=clock)
    clock.now += 5
    assert log.page(0).started_at == 1000.0
    assert log.started_at == 1000.0


def test_one_ending_can_be_asked_for() -> None:
    log = log_with(4)
    page = log.page_of("q2")
    assert [(entry.request_id, entry.sequence) for entry in page.usages] == [("q2", 3)]
    assert log.page_of("unknown").usages == []
