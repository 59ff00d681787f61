"""Writes a directory so that it appears all at once or not at all."""

from __future__ import annotations

import contextlib
import json
import os
import shutil
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from backend.model.errors import ModelLoadError


@contextlib.contextmanager
def staged(out_dir: Path) -> Iterator[Path]:
    """A directory to fill, which takes the place of ``out_dir`` when the block ends without an error."""
    out_dir.parent.mkdir(parents=True, exist_ok=True)
    staging = Path(tempfile.mkdtemp(prefix=f".{out_dir.name}-", dir=out_dir.parent))
    try:
        yield staging
        _replace(staging, out_dir)
    finally:
        shutil.rmtree(staging, ignore_errors=True)


def require_room(directory: Path, num_bytes: int) -> None:
    """Refuse to write what does not fit.

    Raises:
        ModelLoadError: when the file system of ``directory`` has less room than ``num_bytes``.
    """
    free = shutil.disk_usage(directory).free
    if free < num_bytes:
        raise ModelLoadError(
            f"{directory}: the checkpoint needs {num_bytes / 2**20:.0f} MiB and the disk has"
            f" {free / 2**20:.0f} MiB free: make room or choose another data_dir"
        )


def write_json(path: Path, content: dict[str, Any]) -> None:
    """Write a JSON object for people to read, too."""
    path.write_text(json.dumps(content, indent=2, ensure_ascii=False) + "\n", encoding="utf-8")


def _replace(staging: Path, out_dir: Path) -> None:
    for file in staging.iterdir():
        with file.open("rb") as handle:
            os.fsync(handle.fileno())
        file.chmod(0o644)
    staging.chmod(0o755)
    if out_dir.exists():
        old = Path(tempfile.mkdtemp(prefix=f".{out_dir.name}-old-", dir=out_dir.parent))
        out_dir.rename(old / out_dir.name)
        staging.rename(out_dir)
        shutil.rmtree(old)
    else:
        staging.rename(out_dir)
