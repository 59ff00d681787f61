"""Pushes CloudEvents to a collector such as OpenMeter, in batches, from where the last push ended.

An event leaves at least once: the position is written, durably, after the collector has taken a batch. It
counts once, because its id follows from the request and the token class, and collectors drop ids that they
have seen.
"""

from __future__ import annotations

import asyncio
import os
from collections.abc import Callable
from pathlib import Path

import aiohttp
import msgspec

from billing.export import EventPosition, TokenEvent, events
from billing.store import Store
from embergate.refusal import Refusal

_CONTENT_TYPE = "application/cloudevents-batch+json"
_RETRIED = frozenset({408, 425, 429, 500, 502, 503, 504})
_RETRY_MIN_S = 0.5


class PushConfig(msgspec.Struct, frozen=True, kw_only=True):
    """``token`` is sent as a bearer token when there is one.

    ``settle_us``: what was posted more recently waits, since an earlier record of another gateway may still
    be on its way.
    """

    url: str
    token: str
    cursor_path: Path
    max_requests: int = 200
    timeout_s: float = 30.0
    max_attempts: int = 8
    max_retry_s: float = 30.0
    settle_us: int = 10_000_000


async def push_events(store: Store, config: PushConfig, now_us: Callable[[], int]) -> int:
    """Push everything that is new; returns the number of events that were taken.

    Raises:
        Refusal: the collector does not take them, or the position cannot be kept. The next push goes on.
    """
    num_pushed = 0
    timeout = aiohttp.ClientTimeout(total=config.timeout_s)
    async with aiohttp.ClientSession(timeout=timeout) as session:
        while True:
            before_us = now_us() - config.settle_us
            position = read_position(config.cursor_path)
            found = await asyncio.to_thread(_next_batch, store, position, before_us, config.max_requests)
            if not found:
                return num_pushed
            batch = [event for _, group in found for event in group]
            if batch:
                await _post(session, config, batch)
            write_position(config.cursor_path, found[-1][0])
            num_pushed += len(batch)


def read_position(path: Path) -> EventPosition:
    """Where the last push ended; the beginning when there was none. Raises Refusal: the file is damaged."""
    try:
        return msgspec.json.decode(path.read_bytes(), type=EventPosition)
    except FileNotFoundError:
        return EventPosition()
    except (OSError, msgspec.DecodeError) as error:
        raise Refusal(f"{path} does not say where the last push ended: {error}") from error


def write_position(path: Path, position: EventPosition) -> None:
    """Replace the file at once, and only when its successor is on the disk."""
    path.parent.mkdir(parents=True, exist_ok=True)
    fresh = path.with_suffix(".new")
    with fresh.open("wb") as out:
        out.write(msgspec.json.encode(position))
        out.flush()
        os.fsync(out.fileno())
    fresh.replace(path)
    folder = os.open(path.parent, os.O_RDONLY)
    try:
        os.fsync(folder)
    finally:
        os.close(folder)


def _next_batch(
    store: Store, after: EventPosition, before_us: int, max_requests: int
) -> list[tuple[EventPosition, list[TokenEvent]]]:
    with store.reading() as connection:
        return list(events(connection, after=after, posted_before_us=before_us, max_requests=max_requests))


async def _post(session: aiohttp.ClientSession, config: PushConfig, batch: list[TokenEvent]) -> None:
    body = msgspec.json.encode(batch)
    headers = {"content-type": _CONTENT_TYPE}
    if config.token:
        headers["authorization"] = f"Bearer {config.token}"
    delay_s, problem = _RETRY_MIN_S, ""
    for attempt in range(config.max_attempts):
        if attempt:
            await asyncio.sleep(delay_s)
            delay_s = min(2 * delay_s, config.max_retry_s)
        try:
            async with session.post(config.url, data=body, headers=headers) as response:
                if response.status < 300:
                    return
                problem = f"it answered {response.status}"
                if response.status not in _RETRIED:
                    break
        except (aiohttp.ClientError, TimeoutError) as error:
            problem = str(error) or type(error).__name__
    raise Refusal(f"{config.url} does not take events: {problem}; the next push goes on from there")
