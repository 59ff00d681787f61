"""What may be read of a request before anybody has looked at it: bytes of bodies, and bodies of whom."""

from __future__ import annotations

from collections.abc import Callable, Coroutine, Mapping
from typing import Any

EarlyCheck = Callable[[str, Mapping[str, str]], Coroutine[Any, Any, bool]]
"""Given raw path and headers, whether the body is worth reading. When not, the handler gets the request with
an empty body and refuses it for the same reason."""

_EARLY_CHECK_BYTES = 64 * 1024


def is_checked_early(content_length: int, headers: Mapping[str, str]) -> bool:
    """Whether the check pays before the body is read: large, of unknown size (-1), or the client asks."""
    return content_length > _EARLY_CHECK_BYTES or content_length < 0 or "expect" in headers


class BodyBudget:
    """Bytes of request bodies that may be in memory at once, over all connections."""

    def __init__(self, max_bytes: int) -> None:
        self._max_bytes = max_bytes
        self.num_taken = 0

    def take(self, num_bytes: int) -> bool:
        """Reserve, or return False when that is too much. Give back what was taken."""
        if self.num_taken + num_bytes > self._max_bytes:
            return False
        self.num_taken += num_bytes
        return True

    def give_back(self, num_bytes: int) -> None:
        self.num_taken -= num_bytes
