"""Server secrets in files of mode 600: made at random on first use, never shown, never logged."""

from __future__ import annotations

import os
import secrets
from pathlib import Path

POOL_TOKEN = "pool_token"
"""What the gateway shows to replicas; clients' credentials never go further than the edge."""

CACHE_SALT_SECRET = "cache_salt_secret"
"""What the cache salts of accounts derive from. A new one empties every prefix cache, and harms nothing
else.
"""

GATEWAY_ID = "gateway_id"
"""By which a gateway finds its own leases again after a restart. No secret, but as unique as one."""

DASHBOARD_SECRET = "dashboard_secret"
"""What the dashboard signs its cookies with. A new one signs everybody out."""

_NUM_BYTES = 32


def load_or_create(directory: Path, name: str) -> str:
    """The secret ``name``, as hexadecimal text.

    Processes that start at the same time agree on one: the file appears whole or not at all, and the first
    wins.

    Raises:
        OSError: the directory cannot be written, or the file cannot be read.
        ValueError: the file is empty.
    """
    path = directory / name
    if not path.exists():
        _create(directory, path)
    text = path.read_text(encoding="ascii").strip()
    if not text:
        raise ValueError(f"{path} is empty; delete it so that a new secret can be made")
    return text


def _create(directory: Path, path: Path) -> None:
    directory.mkdir(mode=0o700, parents=True, exist_ok=True)
    draft = directory / f".{path.name}.{os.getpid()}.{secrets.token_hex(4)}"
    descriptor = os.open(draft, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600)
    try:
        with os.fdopen(descriptor, "w", encoding="ascii") as file:
            file.write(secrets.token_hex(_NUM_BYTES))
            file.flush()
            os.fsync(file.fileno())
        try:
            os.link(draft, path)
        except FileExistsError:
            return
    finally:
        draft.unlink(missing_ok=True)
