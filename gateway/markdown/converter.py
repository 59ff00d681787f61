"""Converts documents in processes of their own: a few at a time, each for a while, the rest in a queue."""

from __future__ import annotations

import asyncio
import os
import sys
from asyncio.subprocess import PIPE, Process

import msgspec

from gateway.config import MarkdownConfig
from gateway.errors import no_capacity
from gateway.markdown.child import OK, TOO_MUCH, UNREADABLE, Order
from gateway.markdown.formats import Kind

_MIB = 1024 * 1024
_MAX_REASON_BYTES = 4096
_SHARED_VARIABLES = ("PATH", "PYTHONPATH", "VIRTUAL_ENV", "LANG", "LC_ALL")
"""What a conversion gets of the environment: no secret."""


class ConversionError(ValueError):
    """The document could not be converted; the message says why and does not quote it."""


class Converter:
    """Belongs to one event loop. At most ``max_concurrent`` processes run at once."""

    def __init__(self, config: MarkdownConfig) -> None:
        self._config = config
        self._places = asyncio.Semaphore(config.max_concurrent)
        self._num_waiting = 0

    async def convert(self, kind: Kind, data: bytes, *, base_url: str = "", css_selector: str = "") -> str:
        """The document as Markdown.

        Raises:
            ConversionError: it is damaged, or would take too much time, memory or output.
            Refusal: 429, too many wait already, or this one has waited too long.
        """
        config = self._config
        order = Order(
            kind=kind,
            max_memory_bytes=config.max_memory_mib * _MIB,
            max_cpu_s=max(1, round(config.timeout_s)),
            max_output_bytes=config.max_output_bytes,
            base_url=base_url,
            css_selector=css_selector,
        )
        await self._take_place()
        try:
            return await self._run(order, data)
        finally:
            self._places.release()

    async def _take_place(self) -> None:
        if self._num_waiting >= self._config.max_waiting:
            raise no_capacity()
        self._num_waiting += 1
        try:
            await asyncio.wait_for(self._places.acquire(), self._config.wait_s)
        except TimeoutError:
            raise no_capacity() from None
        finally:
            self._num_waiting -= 1

    async def _run(self, order: Order, data: bytes) -> str:
        process = await asyncio.create_subprocess_exec(
            sys.executable,
            "-m",
            "gateway.markdown.child",
            msgspec.json.encode(order).decode(),
            stdin=PIPE,
            stdout=PIPE,
            stderr=PIPE,
            env={name: os.environ[name] for name in _SHARED_VARIABLES if name in os.environ},
        )
        try:
            async with asyncio.timeout(self._config.timeout_s):
                output, reason = await process.communicate(data)
        except TimeoutError:
            raise ConversionError(f"it took longer than {self._config.timeout_s:g} s") from None
        finally:
            await _end(process)
        if process.returncode == OK:
            return output.decode()
        if process.returncode in (UNREADABLE, TOO_MUCH):
            raise ConversionError(reason[:_MAX_REASON_BYTES].decode("utf-8", "replace"))
        raise ConversionError("it cannot be converted")


async def _end(process: Process) -> None:
    """Leave no process behind, whatever happened."""
    if process.returncode is None:
        process.kill()
        await process.wait()
