"""Keeps the log files of child processes within bounds without standing between them and their files.

A child writes straight to its file, opened for appending, so that logging costs the supervisor nothing and
goes on when the supervisor is gone. A file that grew too large is copied aside and truncated; an appending
writer goes on at the new end. Lines written during the copy's last instant may be lost, which a log can bear.
"""

from __future__ import annotations

import os
import shutil
from pathlib import Path


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


def tail(path: Path, num_lines: int, max_bytes: int = 256 * 1024) -> list[str]:
    """The last lines of a log file, reading at most ``max_bytes`` of its end; empty when there is none."""
    try:
        with path.open("rb") as file:
            size = file.seek(0, os.SEEK_END)
            file.seek(max(0, size - max_bytes))
            text = file.read().decode(errors="replace")
    except FileNotFoundError:
        return []
    return text.splitlines()[-num_lines:] if num_lines else []


def _backup(path: Path, number: int) -> Path:
    return path.with_name(f"{path.name}.{number}")
