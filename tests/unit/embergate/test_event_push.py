"""Pushing events to a collector that fails, and going on."""

from __future__ import annotations

import json
import os
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import msgspec
import pytest
from aiohttp import web
from aiohttp.test_utils import TestServer

from billing.store import Store
from embergate.event_push import PushConfig, push_events, read_position
from embergate.refusal import Refusal
from tests.support.ledger import NOON_US, book, open_store, record

LATER_US = NOON_US + 60_000_000


class Collector:
    """Takes batches of events, after as many failures as it is told."""

    def __init__(self) -> None:
        self.events: list[dict[str, Any]] = []
        self.failures: list[int] = []
        self.headers: dict[str, str] = {}

    async def take(self, request: web.Request) -> web.Response:
        self.headers = dict(request.headers)
        if self.failures:
            return web.Response(status=self.failures.pop(0))
        self.events += json.loads(await request.read())
        return web.Response(status=204)


@pytest.fixture
async def collector() -> AsyncIterator[tuple[Collector, str]]:
    made = Collector()
    app = web.Application()
    app.router.add_post("/events", made.take)
    server = TestServer(app)
    await server.start_server()
    yield made, str(server.make_url("/events"))
    await server.close()


@pytest.fixture
def store(tmp_path: Path) -> Any:
    with open_store(tmp_path) as opened:
        opened.post([record(number) for number in range(25)], book())
        yield opened


def config(tmp_path: Path, url: str, **changes: Any) -> PushConfig:
    base = PushConfig(
        url=url,
        token="secret",
        cursor_path=tmp_path / "exports" / "events.json",
        max_requests=10,
        max_retry_s=0.01,
    )
    return msgspec.structs.replace(base, **changes)


async def test_everything_is_pushed_once(
    store: Store, collector: tuple[Collector, str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("embergate.event_push._RETRY_MIN_S", 0.01)
    made, url = collector
    made.failures = [503, 429]
    assert await push_events(store, config(tmp_path, url), lambda: LATER_US) == 75
    assert len({event["id"] for event in made.events}) == len(made.events) == 75
    assert made.headers["Content-Type"] == "application/cloudevents-batch+json"
    assert made.headers["Authorization"] == "Bearer secret"
    assert await push_events(store, config(tmp_path, url), lambda: LATER_US) == 0
    store.post([record(30)], book())
    assert await push_events(store, config(tmp_path, url), lambda: LATER_US) == 3


async def test_a_push_that_fails_goes_on_later(
    store: Store, collector: tuple[Collector, str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("embergate.event_push._RETRY_MIN_S", 0.01)
    made, url = collector
    made.failures = [400]
    with pytest.raises(Refusal, match="answered 400"):
        await push_events(store, config(tmp_path, url), lambda: LATER_US)
    made.failures = [500] * 3
    with pytest.raises(Refusal, match="answered 500"):
        await push_events(store, config(tmp_path, url, max_attempts=3), lambda: LATER_US)
    assert made.events == []
    assert await push_events(store, config(tmp_path, url), lambda: LATER_US) == 75
    store.post([record(40)], book())
    with pytest.raises(Refusal, match="does not take events"):
        await push_events(store, config(tmp_path, "http://127.0.0.1:1/", max_attempts=2), lambda: LATER_US)


async def test_what_is_new_settles_first(
    store: Store, collector: tuple[Collector, str], tmp_path: Path
) -> None:
    _, url = collector
    assert await push_events(store, config(tmp_path, url), lambda: NOON_US + 1) == 0


def test_a_damaged_position_is_not_a_beginning(tmp_path: Path) -> None:
    path = tmp_path / "events.json"
    assert read_position(path).request_id == ""
    path.write_bytes(os.urandom(8))
    with pytest.raises(Refusal, match="does not say"):
        read_position(path)
