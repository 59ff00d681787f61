"""Structured logs: one JSON object per line, on standard error. Never a prompt, an answer or an API token."""

from __future__ import annotations

import asyncio
import logging
import sys
import threading
from collections.abc import Callable
from datetime import UTC, datetime
from functools import lru_cache

import msgspec
from msgspec import UNSET, UnsetType

_log = logging.getLogger(__name__)

_FLUSH_AFTER_S = 0.1
_MAX_BUFFERED = 20_000


class _LogLine(msgspec.Struct, frozen=True, omit_defaults=True):
    time: str
    level: str
    logger: str
    message: str
    exception: str = ""


class AccessLine(msgspec.Struct, frozen=True, kw_only=True):
    """One request, after it ended. What is not known of it is UNSET. Names as in the replicas' lines."""

    time: str
    level: str = "info"
    logger: str = "gateway.request"
    message: str = "request"
    request_id: str
    account: str
    surface: str
    status: int
    model: str | UnsetType = UNSET
    requested_model: str | UnsetType = UNSET
    outcome: str | UnsetType = UNSET
    reason: str | UnsetType = UNSET
    replica: str | UnsetType = UNSET
    num_attempts: int | UnsetType = UNSET
    prompt_tokens: int | UnsetType = UNSET
    cached_prompt_tokens: int | UnsetType = UNSET
    completion_tokens: int | UnsetType = UNSET
    ttft_ms: float | UnsetType = UNSET
    duration_ms: float


class JsonFormatter(logging.Formatter):
    """Formats records of the standard library's loggers."""

    def format(self, record: logging.LogRecord) -> str:
        error = self.formatException(record.exc_info) if record.exc_info else ""
        line = _LogLine(
            timestamp(record.created), record.levelname.lower(), record.name, record.getMessage(), error
        )
        return msgspec.json.encode(line).decode()


def configure_logging(level: str) -> None:
    """Send all logs of this process to standard error as JSON lines. For the composition root only."""
    handler = logging.StreamHandler(sys.stderr)
    handler.setFormatter(JsonFormatter())
    root = logging.getLogger()
    root.handlers[:] = [handler]
    root.setLevel(level.upper())


def timestamp(seconds: float) -> str:
    """RFC 3339 in UTC with milliseconds."""
    whole, millis = divmod(int(seconds * 1000), 1000)
    return f"{_second(whole)}.{millis:03d}Z"


@lru_cache(maxsize=4)
def _second(seconds: int) -> str:
    return datetime.fromtimestamp(seconds, UTC).isoformat(timespec="seconds")[: -len("+00:00")]


class AccessLog:
    """Writes one line per request, joined and in a thread: a log that does not take them holds up no request.

    Lines wait about a tenth of a second. When more than ``_MAX_BUFFERED`` wait, further ones are dropped and
    their number is logged. Belongs to one event loop, apart from :meth:`close`.
    """

    def __init__(self, write: Callable[[bytes], object], loop: asyncio.AbstractEventLoop) -> None:
        self._write = write
        self._loop = loop
        self._lines: list[Callable[[], AccessLine]] = []
        self._num_dropped = 0
        self._is_due = False
        self._writing = threading.Lock()

    def add(self, line: Callable[[], AccessLine]) -> None:
        """Write the line that ``line`` makes; it is called in the thread that writes."""
        if len(self._lines) >= _MAX_BUFFERED:
            self._num_dropped += 1
            return
        self._lines.append(line)
        if not self._is_due:
            self._is_due = True
            self._loop.call_later(_FLUSH_AFTER_S, self._hand_over)

    def close(self) -> None:
        """Write what waits. Blocking."""
        lines, self._lines = self._lines, []
        if lines:
            self._write_lines(lines)

    def _hand_over(self) -> None:
        lines, self._lines = self._lines, []
        if lines:
            self._loop.run_in_executor(None, self._write_lines, lines).add_done_callback(self._written)
        else:
            self._is_due = False

    def _written(self, writing: asyncio.Future[None]) -> None:
        self._is_due = False
        if writing.exception() is not None or self._num_dropped:
            _log.warning("%d access lines dropped: %s", self._num_dropped, writing.exception())
            self._num_dropped = 0
        if self._lines:
            self._is_due = True
            self._loop.call_later(_FLUSH_AFTER_S, self._hand_over)

    def _write_lines(self, lines: list[Callable[[], AccessLine]]) -> None:
        with self._writing:
            self._write(msgspec.json.Encoder().encode_lines([line() for line in lines]))


def stderr_writer() -> Callable[[bytes], None]:
    """A writer to the process's standard error, each time flushed; for :class:`AccessLog`."""
    stream = open(2, "wb", closefd=False)  # noqa: SIM115 - lives as long as the process

    def write(data: bytes) -> None:
        stream.write(data)
        stream.flush()

    return write
