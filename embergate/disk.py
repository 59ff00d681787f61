"""Files written whole: durable secrets, free space, checksums."""

from __future__ import annotations

import hashlib
import os
import shutil
from pathlib import Path

from embergate.refusal import Refusal

_HASH_CHUNK_BYTES = 1024 * 1024


def write_private(path: Path, content: str) -> None:
    """Write a file that only its owner may read, replacing it as a whole."""
    path.parent.mkdir(parents=True, exist_ok=True)
    partial = path.with_name(f"{path.name}.partial")
    partial.unlink(missing_ok=True)
    descriptor = os.open(partial, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600)
    with os.fdopen(descriptor, "w") as file:
        file.write(content)
        file.flush()
        os.fsync(file.fileno())
    partial.replace(path)


def require_space(directory: Path, needed_bytes: int, purpose: str) -> None:
    """Refuse to start what cannot be finished.

    Raises:
        Refusal: when the file system of ``directory`` has fewer than ``needed_bytes`` free.
    """
    free = shutil.disk_usage(directory).free
    if free < needed_bytes:
        raise Refusal(
            f"{purpose} needs {_size(needed_bytes)} free in {directory}, which has {_size(free)}: "
            "make room, or set data_dir in config.yaml to another disk."
        )


def sha256_of(path: Path) -> str:
    """The SHA-256 of a file in hexadecimal, read in pieces."""
    digest = hashlib.sha256()
    with path.open("rb") as file:
        while chunk := file.read(_HASH_CHUNK_BYTES):
            digest.update(chunk)
    return digest.hexdigest()


def _size(num_bytes: int) -> str:
    return f"{num_bytes / 2**30:.2f} GiB" if num_bytes >= 2**30 else f"{num_bytes / 2**20:.1f} MiB"
