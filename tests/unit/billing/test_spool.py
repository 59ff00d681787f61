from __future__ import annotations

import errno
import os
import subprocess
import sys
import textwrap
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from billing.config import SpoolConfig
from billing.framing import FRAME_MARKER, SEGMENT_HEADER, frame, frame_at, has_frame_after, is_blank
from billing.segments import Disk, list_segments
from billing.spool import (
    Spool,
    SpoolCorruptError,
    SpoolError,
    SpoolFullError,
    SpoolLockedError,
    read_spooled,
)
from billing.usage import UsageRecord
from tests.support.ledger import groups_of, record, records

SMALL = SpoolConfig(max_segment_bytes=4_000, reserve_bytes=1_000)
BRIEF = record(request_id="r", token_id="t", model="m", requested_model="m", replica_id="", session="")
REPO = Path(__file__).parents[3]


@contextmanager
def spool_at(directory: Path, config: SpoolConfig = SMALL, disk: Disk | None = None) -> Iterator[Spool]:
    opened = Spool(directory, config, disk)
    try:
        yield opened
    finally:
        opened.close()


def take_all(spool: Spool, batch_size: int = 7) -> list[UsageRecord]:
    """Read and mark everything, in order."""
    taken: list[UsageRecord] = []
    while (batch := spool.read_batch(batch_size)) is not None:
        spool.mark_posted(batch)
        taken.extend(batch.records)
    return taken


def contents(directory: Path) -> list[UsageRecord]:
    """What a fresh process would find."""
    with spool_at(directory) as spool:
        return take_all(spool)


def segments_of(directory: Path) -> list[Path]:
    return [path for _, path in list_segments(directory)]


def copy_of(directory: Path, target: Path, change: Callable[[bytes], bytes], which: int = -1) -> Path:
    """A spool directory with one segment's bytes changed, as if a process had been killed there."""
    target.mkdir(parents=True)
    paths = segments_of(directory)
    for path in paths:
        data = path.read_bytes()
        (target / path.name).write_bytes(change(data) if path == paths[which] else data)
    return target


def cut_at(position: int) -> Callable[[bytes], bytes]:
    return lambda data: data[:position]


def zero_from(position: int) -> Callable[[bytes], bytes]:
    return lambda data: data[:position] + bytes(len(data) - position + 500)


def flip(position: int, bits: int) -> Callable[[bytes], bytes]:
    return lambda data: data[:position] + bytes([data[position] ^ bits]) + data[position + 1 :]


class TestOrder:
    def test_records_come_out_as_they_went_in(self, tmp_path: Path) -> None:
        given = records(100)
        with spool_at(tmp_path) as spool:
            for group in groups_of(given, 9):
                spool.append(group)
            assert spool.num_unposted == 100
            assert take_all(spool) == given
            assert spool.num_unposted == 0
        assert segments_of(tmp_path) == []

    def test_a_batch_is_whole_appends_and_at_least_one(self, tmp_path: Path) -> None:
        with spool_at(tmp_path, SpoolConfig()) as spool:
            for group in groups_of(records(15), 5):
                spool.append(group)
            sizes = []
            for limit in (3, 11):
                batch = spool.read_batch(limit)
                assert batch is not None
                sizes.append(len(batch.records))
                spool.mark_posted(batch)
            assert sizes == [5, 10]
            assert spool.read_batch(1) is None

    def test_reading_again_without_marking_gives_the_same(self, tmp_path: Path) -> None:
        with spool_at(tmp_path) as spool:
            spool.append(records(3))
            first, second = spool.read_batch(10), spool.read_batch(10)
            assert first is not None
            assert first == second

    def test_a_long_append_is_read_whole(self, tmp_path: Path) -> None:
        given = [record(number, session="s" * 2_000) for number in range(1_000)]
        with spool_at(tmp_path, SpoolConfig()) as spool:
            spool.append(given)
            assert take_all(spool) == given

    def test_an_empty_append_is_nothing(self, tmp_path: Path) -> None:
        with spool_at(tmp_path) as spool:
            spool.append([])
            assert spool.read_batch(1) is None
        assert segments_of(tmp_path) == []

    def test_appends_and_reads_interleave(self, tmp_path: Path) -> None:
        given = records(60)
        taken: list[UsageRecord] = []
        with spool_at(tmp_path) as spool:
            for group in groups_of(given, 4):
                spool.append(group)
                batch = spool.read_batch(3)
                assert batch is not None
                taken.extend(batch.records)
                spool.mark_posted(batch)
            assert taken == given


class TestSegments:
    def test_a_posted_segment_is_deleted(self, tmp_path: Path) -> None:
        with spool_at(tmp_path) as spool:
            for group in groups_of(records(50), 5):
                spool.append(group)
            before = segments_of(tmp_path)
            assert len(before) > 3
            assert all(path.stat().st_size <= SMALL.max_segment_bytes for path in before[:-1])
            batch = spool.read_batch(10)
            assert batch is not None
            spool.mark_posted(batch)
            assert segments_of(tmp_path) == before[1:]

    def test_what_is_not_posted_stays_for_the_next_process(self, tmp_path: Path) -> None:
        given = records(50)
        with spool_at(tmp_path) as spool:
            for group in groups_of(given, 5):
                spool.append(group)
            batch = spool.read_batch(5)
            assert batch is not None
            spool.mark_posted(batch)
        left = contents(tmp_path)
        assert (
            left == given[-len(left) :]
        )  # the segment is kept until all of it is posted, so some come twice
        assert len(left) >= 45

    def test_one_batch_must_not_be_marked_for_another_segment(self, tmp_path: Path) -> None:
        with spool_at(tmp_path) as spool:
            for group in groups_of(records(50), 5):
                spool.append(group)
            first = spool.read_batch(1_000)
            assert first is not None
            spool.mark_posted(first)
            with pytest.raises(SpoolError, match="is not the oldest"):
                spool.mark_posted(first)

    def test_a_missing_segment_is_refused(self, tmp_path: Path) -> None:
        with spool_at(tmp_path) as spool:
            for group in groups_of(records(50), 5):
                spool.append(group)
        paths = segments_of(tmp_path)
        paths[1].unlink()
        with pytest.raises(SpoolCorruptError, match="segment 2 is missing"):
            Spool(tmp_path, SMALL)

    def test_other_files_are_left_alone(self, tmp_path: Path) -> None:
        (tmp_path / "notes.txt").write_text("mine")
        with spool_at(tmp_path) as spool:
            spool.append(records(1))
        assert len(contents(tmp_path)) == 1
        assert (tmp_path / "notes.txt").read_text() == "mine"


class TestTornTail:
    """A crash in the middle of an append leaves any part of it; earlier appends must survive all of them."""

    @pytest.fixture
    def whole(self, tmp_path: Path) -> tuple[Path, int]:
        """A spool of two appends, and where the second begins."""
        with spool_at(tmp_path / "whole", SpoolConfig(reserve_bytes=0)) as spool:
            spool.append([BRIEF, BRIEF])
            start = segments_of(tmp_path / "whole")[0].stat().st_size
            spool.append([BRIEF])
        return tmp_path / "whole", start

    def test_cut_at_every_byte_of_the_last_append(self, whole: tuple[Path, int], tmp_path: Path) -> None:
        directory, start = whole
        for cut in range(start, segments_of(directory)[0].stat().st_size):
            crashed = copy_of(directory, tmp_path / f"cut-{cut}", cut_at(cut))
            assert contents(crashed) == [BRIEF] * 2, f"cut at byte {cut}"
        assert contents(directory) == [BRIEF] * 3

    def test_zeroed_from_any_byte_of_the_last_append(self, whole: tuple[Path, int], tmp_path: Path) -> None:
        """The file had been extended, but the data did not reach the medium."""
        directory, start = whole
        for cut in range(start, segments_of(directory)[0].stat().st_size, 5):
            crashed = copy_of(
                directory,
                tmp_path / f"zero-{cut}",
                zero_from(cut),
            )
            assert contents(crashed) == [BRIEF] * 2, f"zero from byte {cut}"

    def test_any_byte_of_the_last_append_may_be_wrong(self, whole: tuple[Path, int], tmp_path: Path) -> None:
        directory, start = whole
        for position in range(start, segments_of(directory)[0].stat().st_size, 5):
            crashed = copy_of(
                directory,
                tmp_path / f"bit-{position}",
                flip(position, 0x10),
            )
            assert contents(crashed) == [BRIEF] * 2, f"bit flipped in byte {position}"

    def test_cut_at_every_byte_of_the_header(self, tmp_path: Path) -> None:
        with spool_at(tmp_path / "whole", SpoolConfig(reserve_bytes=0)) as spool:
            spool.append(records(1))
        for cut in range(len(SEGMENT_HEADER)):
            crashed = copy_of(tmp_path / "whole", tmp_path / f"cut-{cut}", cut_at(cut))
            assert contents(crashed) == []

    def test_appending_goes_on_after_recovery(self, tmp_path: Path) -> None:
        given = records(6)
        with spool_at(tmp_path / "whole") as spool:
            spool.append(given[:2])
            spool.append(given[2:4])
        crashed = copy_of(tmp_path / "whole", tmp_path / "crashed", lambda data: data[:-1])
        with spool_at(crashed) as spool:
            spool.append(given[4:])
            assert spool.num_unposted == 4
        assert contents(crashed) == given[:2] + given[4:]


class TestDamage:
    @pytest.fixture
    def whole(self, tmp_path: Path) -> Path:
        with spool_at(tmp_path / "whole", SpoolConfig(reserve_bytes=0)) as spool:
            for group in groups_of(records(6), 2):
                spool.append(group)
        return tmp_path / "whole"

    def test_a_bad_frame_with_a_sound_one_behind_it_is_refused(self, whole: Path, tmp_path: Path) -> None:
        first_frame_end = segments_of(whole)[0].read_bytes().index(FRAME_MARKER, len(SEGMENT_HEADER) + 1)
        for position in range(len(SEGMENT_HEADER), first_frame_end, 5):
            damaged = copy_of(
                whole,
                tmp_path / f"bad-{position}",
                flip(position, 0x01),
            )
            with pytest.raises(SpoolCorruptError, match=r"damaged at byte \d+.*backup"):
                Spool(damaged, SMALL)

    def test_refusing_changes_nothing_and_lets_go_of_the_lock(self, whole: Path, tmp_path: Path) -> None:
        damaged = copy_of(whole, tmp_path / "bad", lambda data: data[:40] + b"?" + data[41:])
        before = segments_of(damaged)[0].read_bytes()
        for _ in range(2):
            with pytest.raises(SpoolCorruptError):
                Spool(damaged, SMALL)
        assert segments_of(damaged)[0].read_bytes() == before

    def test_an_older_segment_may_not_be_cut(self, tmp_path: Path) -> None:
        with spool_at(tmp_path / "whole") as spool:
            for group in groups_of(records(50), 5):
                spool.append(group)
        damaged = copy_of(tmp_path / "whole", tmp_path / "bad", lambda data: data[:-1], which=0)
        with pytest.raises(SpoolCorruptError, match="damaged"):
            Spool(damaged, SMALL)

    def test_a_foreign_file_is_refused(self, whole: Path, tmp_path: Path) -> None:
        damaged = copy_of(whole, tmp_path / "bad", lambda data: b"something else" + data[14:])
        with pytest.raises(SpoolCorruptError, match="does not begin like a segment"):
            Spool(damaged, SMALL)

    def test_damage_while_running_is_refused_when_read(self, tmp_path: Path) -> None:
        with spool_at(tmp_path) as spool:
            spool.append(records(2))
            with segments_of(tmp_path)[0].open("r+b") as file:
                file.seek(60)
                file.write(b"\0\0\0\0\0")
            with pytest.raises(SpoolCorruptError, match="after it was written"):
                spool.read_batch(10)

    def test_no_text_of_a_client_can_look_like_a_frame(self) -> None:
        with pytest.raises(UnicodeDecodeError):
            FRAME_MARKER.decode()
        inner = frame(b"payload", 1)
        assert frame_at(inner, 0) is not None
        assert has_frame_after(b"x" + inner, 0)
        assert not has_frame_after(b"x" + inner[:-1], 0)
        assert is_blank(b"ab\0\0", 2)
        assert not is_blank(b"ab\0x", 2)


class FailingDisk(Disk):
    """Fails the next call of a kind with an error number, after half of the bytes were written."""

    def __init__(self) -> None:
        self.fail_write: int | None = None
        self.fail_flush: int | None = None

    def write(self, descriptor: int, data: bytes, offset: int) -> int:
        if self.fail_write is None:
            return super().write(descriptor, data, offset)
        number, self.fail_write = self.fail_write, None
        os.pwrite(descriptor, data[: len(data) // 2], offset)
        raise OSError(number, os.strerror(number))

    def flush(self, descriptor: int) -> None:
        if self.fail_flush is not None:
            number, self.fail_flush = self.fail_flush, None
            raise OSError(number, os.strerror(number))
        super().flush(descriptor)


class ShortDisk(Disk):
    """Writes a little at a time, as the kernel may."""

    def write(self, descriptor: int, data: bytes, offset: int) -> int:
        return super().write(descriptor, data[:100], offset)


class TestFailingDisk:
    @pytest.fixture
    def disk(self) -> FailingDisk:
        return FailingDisk()

    @pytest.mark.parametrize("reserve_bytes", [0, 1_000])
    def test_a_full_disk_is_said_clearly_and_nothing_half_written_counts(
        self, tmp_path: Path, disk: FailingDisk, reserve_bytes: int
    ) -> None:
        given = records(6)
        with spool_at(tmp_path, SpoolConfig(reserve_bytes=reserve_bytes), disk) as spool:
            spool.append(given[:2])
            disk.fail_write = errno.ENOSPC
            with pytest.raises(SpoolFullError, match="free some disk space"):
                spool.append(given[2:4])
            assert spool.num_unposted == 2
            spool.append(given[4:])
            assert take_all(spool) == given[:2] + given[4:]

    def test_nor_after_a_crash_right_then(self, tmp_path: Path, disk: FailingDisk) -> None:
        given = records(4)
        with spool_at(tmp_path / "whole", SpoolConfig(reserve_bytes=0), disk) as spool:
            spool.append(given[:2])
            disk.fail_write = errno.ENOSPC
            with pytest.raises(SpoolFullError):
                spool.append(given[2:])
            crashed = copy_of(tmp_path / "whole", tmp_path / "crashed", lambda data: data)
        assert contents(crashed) == given[:2]

    @pytest.mark.parametrize("fail", ["fail_write", "fail_flush"])
    def test_a_disk_too_full_for_a_new_segment_leaves_no_file(
        self, tmp_path: Path, disk: FailingDisk, fail: str
    ) -> None:
        setattr(disk, fail, errno.ENOSPC)
        with spool_at(tmp_path, SMALL, disk) as spool:
            with pytest.raises(SpoolFullError):
                spool.append(records(1))
            assert segments_of(tmp_path) == []
            spool.append(records(1))
            assert take_all(spool) == records(1)

    def test_after_a_failed_flush_a_new_file_is_used(self, tmp_path: Path, disk: FailingDisk) -> None:
        given = records(6)
        with spool_at(tmp_path, SpoolConfig(), disk) as spool:
            spool.append(given[:2])
            disk.fail_flush = errno.EIO
            with pytest.raises(SpoolError, match="Input/output error"):
                spool.append(given[2:4])
            assert spool.num_unposted == 2
            spool.append(given[4:])
            assert len(segments_of(tmp_path)) == 2
        assert contents(tmp_path) == given[:2] + given[4:]

    def test_short_writes_are_completed(self, tmp_path: Path) -> None:
        with spool_at(tmp_path, SMALL, ShortDisk()) as spool:
            spool.append(records(2))
            assert take_all(spool) == records(2)

    def test_a_directory_that_cannot_be_made_is_named(self, tmp_path: Path) -> None:
        (tmp_path / "file").write_text("")
        with pytest.raises(SpoolError, match=r"file/spool: Not a directory"):
            Spool(tmp_path / "file" / "spool", SMALL)


class TestLimits:
    def test_unposted_records_are_bounded(self, tmp_path: Path) -> None:
        config = SpoolConfig(max_unposted_records=10)
        with spool_at(tmp_path, config) as spool:
            spool.append(records(8))
            with pytest.raises(SpoolFullError, match="max_unposted_records is 10"):
                spool.append(records(3))
            spool.append(records(2))
            take_all(spool)
            spool.append(records(10))

    def test_one_process_at_a_time(self, tmp_path: Path) -> None:
        refused = pytest.raises(SpoolLockedError, match=f"in use by process {os.getpid()}")
        with spool_at(tmp_path), refused:
            Spool(tmp_path, SMALL)
        with spool_at(tmp_path) as spool:
            spool.append(records(1))

    def test_a_closed_spool_refuses(self, tmp_path: Path) -> None:
        spool = Spool(tmp_path, SMALL)
        spool.close()
        spool.close()
        with pytest.raises(SpoolError, match="closed"):
            spool.append(records(1))


class TestReadingBesideARunningEdge:
    def test_sees_what_is_there_without_the_lock(self, tmp_path: Path) -> None:
        given = records(50)
        with spool_at(tmp_path) as spool:
            for group in groups_of(given, 5):
                spool.append(group)
            assert list(read_spooled(tmp_path)) == given
            assert spool.num_unposted == 50

    def test_stops_at_an_append_that_is_being_written(self, tmp_path: Path) -> None:
        with spool_at(tmp_path / "whole", SpoolConfig(reserve_bytes=0)) as spool:
            spool.append(records(4)[:2])
            spool.append(records(4)[2:])
        partial = copy_of(tmp_path / "whole", tmp_path / "partial", lambda data: data[:-3])
        assert list(read_spooled(partial)) == records(4)[:2]

    def test_no_directory_is_no_records(self, tmp_path: Path) -> None:
        assert list(read_spooled(tmp_path / "none")) == []


KILLED = textwrap.dedent("""
    import sys
    from pathlib import Path
    from billing.config import SpoolConfig
    from billing.spool import Spool
    from tests.support.ledger import record

    spool = Spool(Path(sys.argv[1]), SpoolConfig(max_segment_bytes=20_000, reserve_bytes=4_000))
    first = int(sys.argv[2])
    for number in range(first, first + 1_000_000, 3):
        spool.append([record(number), record(number + 1), record(number + 2)])
        print(number + 2, flush=True)
        if sys.argv[3] == "post" and number % 12 == 0:
            batch = spool.read_batch(5)
            print("posted", *(record.request_id for record in batch.records), flush=True)
            spool.mark_posted(batch)
""")


@pytest.mark.slow
@pytest.mark.parametrize("posting", ["keep", "post"])
def test_a_killed_process_loses_no_acknowledged_record(tmp_path: Path, posting: str) -> None:
    """``kill -9`` while appending, three times over: every acknowledged record is there, exactly once."""
    acknowledged: set[str] = set()
    posted: set[str] = set()
    for life in range(3):
        child = subprocess.Popen(
            [sys.executable, "-c", KILLED, str(tmp_path), str(life * 1_000_000), posting],
            stdout=subprocess.PIPE,
            text=True,
            cwd=REPO,
        )
        assert child.stdout is not None
        lines = [child.stdout.readline() for _ in range(40 + 7 * life)]
        child.kill()
        lines += child.stdout.read().splitlines(keepends=True)
        child.wait()
        child.stdout.close()
        for line in lines:
            words = line.split()
            if words and words[0] == "posted" and line.endswith("\n"):
                posted.update(words[1:])
            elif words and line.endswith("\n"):
                acknowledged.update(
                    f"request-{number:06d}" for number in range(int(words[0]) - 2, int(words[0]) + 1)
                )
    found = [record.request_id for record in contents(tmp_path)]
    assert len(found) == len(set(found))
    assert acknowledged <= set(found) | posted
    assert len(acknowledged) >= 100
