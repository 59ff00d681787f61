"""What the usage API says of some sessions: the bill, as an outsider reads it."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import aiohttp
import click

from loadtest.exchange import Endpoint

Row = Mapping[str, Any]
_PAGE = 500
_SESSIONS_PER_QUERY = 50
_PATIENCE_S = 30.0


async def billed_rows(
    session: aiohttp.ClientSession,
    endpoint: Endpoint,
    sessions: Sequence[str],
    is_complete: Callable[[Mapping[str, Row]], bool],
) -> dict[str, Row]:
    """The sessions' rows by request id, once ``is_complete`` or half a minute is over.

    Raises:
        click.ClickException: the API does not answer.
    """
    deadline = time.monotonic() + _PATIENCE_S
    while True:
        rows: dict[str, Row] = {}
        for part in _parts(sessions):
            cursor: str | None = ""
            while cursor is not None:
                query = [("group_by", "request"), ("limit", str(_PAGE)), *part]
                query += [("cursor", cursor)] if cursor else []
                answer = await _read(session, endpoint, query)
                rows |= {row["request_id"]: row for row in answer["result"]}
                cursor = answer["result_info"]["cursor"]
        if is_complete(rows) or time.monotonic() > deadline:
            return rows
        await asyncio.sleep(0.5)


async def billed_total(
    session: aiohttp.ClientSession, endpoint: Endpoint, sessions: Sequence[str], names: Sequence[str]
) -> dict[str, int]:
    """The sums that the API keeps for the sessions, of the named figures. Raises click.ClickException."""
    total = dict.fromkeys(names, 0)
    for part in _parts(sessions):
        for row in (await _read(session, endpoint, [("group_by", "none"), *part]))["result"]:
            for name in total:
                total[name] += int(row[name])
    return total


def _parts(sessions: Sequence[str]) -> list[list[tuple[str, str]]]:
    starts = range(0, len(sessions), _SESSIONS_PER_QUERY)
    return [[("session", name) for name in sessions[start : start + _SESSIONS_PER_QUERY]] for start in starts]


async def _read(
    session: aiohttp.ClientSession, endpoint: Endpoint, query: Sequence[tuple[str, str]]
) -> Mapping[str, Any]:
    async with session.get(f"{endpoint.api}/usage", params=query) as response:
        if response.status != 200:
            text = (await response.text())[:200]
            raise click.ClickException(f"the usage API does not answer: {response.status} {text}")
        answer: Mapping[str, Any] = await response.json()
        return answer
