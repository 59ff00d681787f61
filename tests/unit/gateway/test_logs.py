"""Lines of logs."""

from __future__ import annotations

import asyncio
import json
import logging
import threading
from functools import partial

import msgspec
import pytest

from backend.telemetry import JsonLogFormatter
from gateway import logs
from gateway.logs import AccessLine, AccessLog, JsonFormatter, timestamp
from tests.support.waiting import eventually


def line(number: int) -> AccessLine:
    return AccessLine(
        time="t", request_id=f"q{number}", account="a", surface="v1", status=200, duration_ms=1.5
    )


class Sink:
    """Where lines go; holds them up when told to."""

    def __init__(self) -> None:
        self.written = b""
        self.is_free = threading.Event()
        self.is_free.set()
        self.error: OSError | None = None

    def write(self, data: bytes) -> None:
        self.is_free.wait(5)
        if self.error is not None:
            raise self.error
        self.written += data

    @property
    def ids(self) -> list[str]:
        return [json.loads(one)["request_id"] for one in self.written.splitlines()]


async def test_lines_come_soon_in_order_and_each_on_a_line_of_its_own() -> None:
    sink = Sink()
    access = AccessLog(sink.write, asyncio.get_running_loop())
    for number in range(5):
        access.add(partial(line, number))
    assert sink.ids == []
    await eventually(lambda: sink.ids == ["q0", "q1", "q2", "q3", "q4"])
    access.add(partial(line, 5))
    await eventually(lambda: len(sink.ids) == 6)
    access.add(partial(line, 6))
    access.close()
    assert sink.ids == [f"q{number}" for number in range(7)]
    await asyncio.sleep(0.15)
    assert len(sink.ids) == 7


async def test_a_log_that_takes_nothing_holds_up_nothing_and_loses_only_what_is_too_much(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(logs, "_MAX_BUFFERED", 3)
    sink = Sink()
    sink.is_free.clear()
    access = AccessLog(sink.write, asyncio.get_running_loop())
    access.add(partial(line, 0))
    await asyncio.sleep(0.15)
    for number in range(1, 10):
        access.add(partial(line, number))
    sink.is_free.set()
    await eventually(lambda: sink.ids == ["q0", "q1", "q2", "q3"])
    assert "6 access lines dropped" in caplog.text


async def test_a_log_that_fails_is_said_and_survived(caplog: pytest.LogCaptureFixture) -> None:
    sink = Sink()
    sink.error = OSError("broken pipe")
    access = AccessLog(sink.write, asyncio.get_running_loop())
    access.add(partial(line, 0))
    await eventually(lambda: "broken pipe" in caplog.text)
    sink.error = None
    access.add(partial(line, 1))
    await eventually(lambda: sink.ids == ["q1"])


def test_other_logs_are_json_lines_too() -> None:
    try:
        raise ValueError("bad")
    except ValueError as error:
        record = logging.LogRecord("n", logging.ERROR, "", 0, "it %s", ("failed",), (ValueError, error, None))
    shown = json.loads(JsonFormatter().format(record))
    assert (shown["level"], shown["logger"], shown["message"]) == ("error", "n", "it failed")
    assert "ValueError: bad" in shown["exception"]


def test_lines_of_gateway_and_replica_begin_alike() -> None:
    record = logging.LogRecord("n", logging.INFO, "", 0, "it happened", (), None)
    common = ["time", "level", "logger", "message"]
    shown = [JsonFormatter().format(record), JsonLogFormatter("replica-0").format(record)]
    shown.append(msgspec.json.encode(line(1)).decode())
    assert [list(json.loads(one))[:4] for one in shown] == [common] * 3
    assert not any(": " in one for one in shown), "compact"
    assert "prompt_tokens" not in shown[2], "what is not known is left out"


def test_timestamps_are_utc_with_milliseconds() -> None:
    assert timestamp(0.0015) == "1970-01-01T00:00:00.001Z"
    assert timestamp(1_796_069_317.5) == "2026-11-30T20:08:37.500Z"
