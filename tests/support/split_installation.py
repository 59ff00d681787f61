"""An installation whose two replicas have roles."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import yaml

from tests.support.installation import Installation


@contextmanager
def split_installation(home: Path, roles: Sequence[str], **replicas: Any) -> Iterator[Installation]:
    """Up for as long as the context lasts; ``replicas`` are further settings of theirs."""
    installation = Installation(home)
    installation.config["replicas"] |= {"roles": list(roles), "count": len(roles), **replicas}
    (home / "config.yaml").write_text(yaml.safe_dump(installation.config))
    try:
        installation.up()
        yield installation
    finally:
        installation.run("down")
        assert installation.own_processes() == []
