"""Keeps the log files of child processes within bounds without standing between them and their files.

A child writes straight to its file, opened for appending, so that logging costs the supervisor nothing and
goes on when the supervisor is gone. A file that grew too large is copied aside and truncated; an appending
writer goes on at the new end. Lines written during the copy's last instant may be lost, which a log can bear.
"""

from __future__ import annotations

import os
import shutil
from pathlib import Path

_READ_BYTES = 64 * 1024


def open_log(path: Path) -> int:
    """Open a log file for a child to append to; the caller closes the descriptor."""
    path.parent.mkdir(parents=True, exist_ok=True)
    return os.open(path, os.O_WRONLY | os.O_APPEND | os.O_CREAT, 0o600)


def rotate(path: Path, max_bytes: int, num_backups: int) -> bool:
    """Move the contents of ``path`` to ``path.1`` (and older ones up) when it exceeds ``max_bytes``.

    Returns:
        Whether the file was rotated.
    """
    try:
        if path.stat().st_size <= max_bytes:
            return False
    except FileNotFoundError:
        return False
    for number in range(num_backups - 1, 0, -1):
        older = _backup(path, number)
        if older.exists():
            older.replace(_backup(path, number + 1))
    if num_backups > 0:
        try:
            shutil.copyfile(path, _backup(path, 1))
            _backup(path, 1).chmod(0o600)
        except OSError:
            # On a full disk the bound matters more than what was written.
            _backup(path, 1).unlink(missing_ok=True)
    os.truncate(path, 0)
    return True


def tail(path: Path, num_lines: int) -> list[str]:
    """The last lines of a log, those that were rotated away among them; empty when there is no log."""
    lines: list[str] = []
    number = 0
    log = path
    while len(lines) < num_lines and log.exists():
        lines = _last_lines(log, num_lines - len(lines)) + lines
        number += 1
        log = _backup(path, number)
    return lines


def _last_lines(path: Path, num_lines: int) -> list[str]:
    """Read backwards, so that the end of a long file costs no more than its lines."""
    pieces: list[bytes] = []
    num_breaks = 0
    with path.open("rb") as file:
        position = file.seek(0, os.SEEK_END)
        while position > 0 and num_breaks <= num_lines:
            start = max(0, position - _READ_BYTES)
            file.seek(start)
            pieces.append(file.read(position - start))
            num_breaks += pieces[-1].count(b"\n")
            position = start
    text = b"".join(reversed(pieces)).decode(errors="replace")
    lines = text.split("\n")
    if not lines[-1]:
        lines.pop()
    return lines[-num_lines:]


def _backup(path: Path, number: int) -> Path:
    return path.with_name(f"{path.name}.{number}")
