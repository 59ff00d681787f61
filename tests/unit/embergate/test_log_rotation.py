"""Log files stay within bounds while their writers go on writing."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from embergate import log_rotation
from embergate.log_rotation import open_log, rotate, tail


def test_a_writer_goes_on_in_the_same_file_after_a_rotation(tmp_path: Path) -> None:
    path = tmp_path / "logs" / "gateway.log"
    log = open_log(path)
    try:
        os.write(log, b"old\n" * 10)
        assert rotate(path, max_bytes=20, num_backups=2)
        os.write(log, b"new\n")
    finally:
        os.close(log)
    assert path.read_bytes() == b"new\n"
    assert path.with_name("gateway.log.1").read_bytes() == b"old\n" * 10
    assert path.stat().st_mode & 0o777 == 0o600
    assert path.with_name("gateway.log.1").stat().st_mode & 0o777 == 0o600


def test_only_so_many_backups_are_kept(tmp_path: Path) -> None:
    path = tmp_path / "x.log"
    for number in range(5):
        path.write_text(f"{number}" * 10)
        assert rotate(path, max_bytes=1, num_backups=2)
    assert sorted(file.name for file in tmp_path.iterdir()) == ["x.log", "x.log.1", "x.log.2"]
    assert path.with_name("x.log.1").read_text() == "4" * 10
    assert path.with_name("x.log.2").read_text() == "3" * 10


def test_without_backups_a_large_file_is_emptied(tmp_path: Path) -> None:
    path = tmp_path / "x.log"
    path.write_text("x" * 10)
    assert rotate(path, max_bytes=1, num_backups=0)
    assert [file.name for file in tmp_path.iterdir()] == ["x.log"]
    assert path.read_text() == ""


def test_a_small_or_missing_file_is_left_alone(tmp_path: Path) -> None:
    path = tmp_path / "x.log"
    assert not rotate(path, max_bytes=10, num_backups=2)
    path.write_text("x" * 10)
    assert not rotate(path, max_bytes=10, num_backups=2)


def test_tail_reads_the_last_lines(tmp_path: Path) -> None:
    path = tmp_path / "x.log"
    assert tail(path, 3) == []
    path.write_text("\n".join(f"line {n}" for n in range(1000)))
    assert tail(path, 2) == ["line 998", "line 999"]
    assert tail(path, 0) == []
    assert len(tail(path, 5000)) == 1000


def test_tail_gives_as_many_whole_lines_as_asked_for_whatever_their_size(tmp_path: Path) -> None:
    path = tmp_path / "x.log"
    lines = [f"{n} " + "é" * (n * 7 % 5000) for n in range(500)]
    path.write_text("\n".join(lines) + "\n")
    for num_lines in (1, 37, 499, 500):
        assert tail(path, num_lines) == lines[-num_lines:]


def test_tail_goes_on_in_what_was_rotated_away(tmp_path: Path) -> None:
    path = tmp_path / "x.log"
    for text in ("a\nb\n", "c\nd\n"):
        path.write_text(text)
        rotate(path, max_bytes=1, num_backups=2)
    path.write_text("e\n")
    assert tail(path, 4) == ["b", "c", "d", "e"]
    assert tail(path, 9) == ["a", "b", "c", "d", "e"]


def test_on_a_full_disk_the_bound_is_kept_without_a_backup(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(source: Path, target: Path) -> None:
        target.write_text("half")
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(log_rotation.shutil, "copyfile", refuse)
    path = tmp_path / "x.log"
    path.write_text("x" * 10)
    assert rotate(path, max_bytes=1, num_backups=2)
    assert [file.name for file in tmp_path.iterdir()] == ["x.log"]
    assert path.read_text() == ""
