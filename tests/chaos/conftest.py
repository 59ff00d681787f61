"""An installation for each module, to be maltreated."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from tests.support.installation import Installation


@pytest.fixture(scope="module")
def installation(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Installation]:
    """Started once; whatever a test did, nothing is left afterwards."""
    installation = Installation(tmp_path_factory.mktemp("installation"))
    installation.up()
    yield installation
    installation.run("down")
    assert installation.own_processes() == []
