"""Which tests stay together when pytest-xdist shares them out, and which begin."""

from __future__ import annotations

import pytest
from xdist.scheduler import LoadFileScheduling

_WHOLE_INSTALLATIONS = ("tests/e2e/", "tests/chaos/")


class FilesStayTogether(LoadFileScheduling):
    """A file's tests share its fixtures, so one worker runs them. What starts whole installations is as one
    file: two at once would be too much for a small machine.
    """

    def _split_scope(self, nodeid: str) -> str:
        return "installations" if nodeid.startswith(_WHOLE_INSTALLATIONS) else super()._split_scope(nodeid)


def longest_first(items: list[pytest.Item]) -> list[pytest.Item]:
    """What takes long begins, so that no worker is alone with it at the end. Files stay whole."""
    slow_files = {item.path for item in items if item.get_closest_marker("slow")}

    def rank(item: pytest.Item) -> int:
        return 0 if item.nodeid.startswith(_WHOLE_INSTALLATIONS) else 1 if item.path in slow_files else 2

    return sorted(items, key=rank)
