"""One supervised process: how it is started, asked to stop, and made to."""

from __future__ import annotations

import asyncio
import contextlib
import os
from collections.abc import Sequence
from pathlib import Path

import msgspec

from embergate.lifeline import LIFELINE_VARIABLE
from embergate.log_rotation import open_log
from embergate.run_state import ProcessIdentity, kill_group


class ChildSpec(msgspec.Struct, frozen=True, kw_only=True):
    """What to run. ``health_url`` answers 200 once it is ready; ``stop_grace_s`` is how long it may drain."""

    name: str
    command: Sequence[str]
    environment: dict[str, str]
    url: str
    health_url: str
    log: Path
    stop_grace_s: float


class Child:
    """A running process.

    It leads a session of its own, so that a terminal's Ctrl-C reaches only the supervisor, and its standard
    input is the lifeline that ends it when the supervisor is gone.
    """

    def __init__(self, spec: ChildSpec, process: asyncio.subprocess.Process) -> None:
        self._spec = spec
        self._process = process
        self.identity = ProcessIdentity.of(process.pid)

    @classmethod
    async def spawn(cls, spec: ChildSpec) -> Child:
        """Start the process with its output appended to its log.

        Raises:
            OSError: when it cannot be started.
        """
        log = open_log(spec.log)
        try:
            process = await asyncio.create_subprocess_exec(
                *spec.command,
                stdin=asyncio.subprocess.PIPE,
                stdout=log,
                stderr=log,
                env={**os.environ, **spec.environment, LIFELINE_VARIABLE: "1"},
                start_new_session=True,
            )
        finally:
            os.close(log)
        return cls(spec, process)

    async def wait(self) -> int:
        """Wait for its end, then end its own children; returns the exit code (negative: the signal)."""
        code = await self._process.wait()
        kill_group(self._process.pid)
        return code

    async def stop(self, force: asyncio.Event) -> None:
        """Ask it to stop, and make it stop when its grace is over or ``force`` is set."""
        with contextlib.suppress(ProcessLookupError):
            self._process.terminate()
        gone = asyncio.ensure_future(self._process.wait())
        forced = asyncio.ensure_future(force.wait())
        await asyncio.wait(
            (gone, forced), timeout=self._spec.stop_grace_s, return_when=asyncio.FIRST_COMPLETED
        )
        forced.cancel()
        kill_group(self._process.pid)
        await gone


def describe_exit(code: int) -> str:
    """An exit code in words."""
    return f"was ended by signal {-code}" if code < 0 else f"ended with exit code {code}"
