"""One running installation for all end-to-end tests."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from tests.support.installation import Installation


@pytest.fixture(scope="package")
def installation(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Installation]:
    """Started once, stopped at the end; nothing of it may be left then."""
    installation = Installation(tmp_path_factory.mktemp("installation"), num_embedding_replicas=1)
    installation.up()
    yield installation
    installation.down()
    assert installation.own_processes() == []
