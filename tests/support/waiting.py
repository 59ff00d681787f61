"""Waiting for something that only polling can see, within a bound."""

from __future__ import annotations

import asyncio
from collections.abc import Callable


async def eventually(is_so: Callable[[], bool], timeout_s: float = 20.0, interval_s: float = 0.02) -> None:
    """Return once ``is_so``; raises TimeoutError when that takes too long."""
    async with asyncio.timeout(timeout_s):
        while not is_so():  # noqa: ASYNC110 - the state of other processes sets no event
            await asyncio.sleep(interval_s)
