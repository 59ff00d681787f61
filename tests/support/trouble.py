"""What goes wrong around gateways: databases that go away, disks that fill up, processes that are killed."""

from __future__ import annotations

import asyncio
import errno
import os
import random
import signal
import sqlite3
import subprocess
from collections import Counter
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Protocol

from tests.support.fleet import Fleet
from tests.support.postgres import PostgresServer


class Database(Protocol):
    """A database that can be made to go away for a while."""

    async def vanish(self, seconds: float) -> None:
        """Answer nobody for that long, then come back."""


class RestartedPostgres:
    """A server that crashes and is started again, which then recovers from its log."""

    def __init__(self, server: PostgresServer) -> None:
        self._server = server

    async def vanish(self, seconds: float) -> None:
        await asyncio.to_thread(self._server.stop, signal.SIGQUIT)
        await asyncio.sleep(seconds)
        await asyncio.to_thread(self._server.start)


class LockedSqlite:
    """A file has no server to restart: somebody else keeps it locked instead."""

    def __init__(self, path: Path) -> None:
        self._path = path

    async def vanish(self, seconds: float) -> None:
        connection = sqlite3.connect(self._path, isolation_level=None, timeout=30, check_same_thread=False)
        try:
            await asyncio.to_thread(connection.execute, "BEGIN EXCLUSIVE")
            await asyncio.sleep(seconds)
            connection.execute("ROLLBACK")
        finally:
            connection.close()


class SmallDisk:
    """A file system of little room, mounted on a directory: only root can have one."""

    def __init__(self, directory: Path, size_bytes: int) -> None:
        """Raises OSError when it cannot be mounted."""
        directory.mkdir(parents=True, exist_ok=True)
        self._directory = directory
        mount = ["mount", "-t", "tmpfs", "-o", f"size={size_bytes},mode=700", "tmpfs", str(directory)]
        try:
            done = subprocess.run(mount, capture_output=True, text=True, check=False)
        except FileNotFoundError as error:
            raise OSError("there is no mount here") from error
        if done.returncode:
            raise OSError(f"no file system can be mounted here: {done.stderr.strip()}")

    async def fill(self, is_enough: Callable[[], bool], timeout_s: float) -> None:
        """Leave no room until it is enough. Raises TimeoutError."""
        filler = self._directory / "filler"
        with filler.open("wb", buffering=0) as file:
            async with asyncio.timeout(timeout_s):
                while not is_enough():
                    try:
                        file.write(bytes(4096))
                    except OSError as error:
                        if error.errno != errno.ENOSPC:
                            raise
                        await asyncio.sleep(0.02)  # what is deleted meanwhile makes no room for others
        filler.unlink()

    def remove(self) -> None:
        """Unmount it."""
        subprocess.run(["umount", "-l", str(self._directory)], check=True)


class Killer:
    """Kills gateways with ``kill -9`` at random; each comes back a moment later."""

    def __init__(self, fleet: Fleet, draw: random.Random) -> None:
        self._fleet = fleet
        self._draw = draw
        self.killed: Counter[str] = Counter()

    async def work(self) -> None:
        """Until cancelled. All run again, or are about to, when it ends."""
        victim = ""
        try:
            while True:
                await asyncio.sleep(self._draw.uniform(0.5, 2.0))
                victim = self._draw.choice(self._fleet.gateways)
                self._fleet.kill(victim)
                self.killed[victim] += 1
                await asyncio.sleep(self._draw.uniform(0.0, 0.5))
                self._fleet.restart(victim)
                await self._until_it_listens(victim)
                victim = ""
        finally:
            if victim and not self._fleet.is_started(victim):
                self._fleet.restart(victim)

    async def until_all_listen(self) -> None:
        """Return when every gateway accepts connections."""
        for name in self._fleet.gateways:
            await self._until_it_listens(name)

    async def _until_it_listens(self, name: str) -> None:
        """On a busy machine a start takes seconds; nothing is proved when none is ever up."""
        while True:
            with suppress(OSError):
                _, writer = await asyncio.open_connection("127.0.0.1", self._fleet.port(name))
                writer.close()
                return
            await asyncio.sleep(0.05)


def can_mount(directory: Path) -> str:
    """Empty when a :class:`SmallDisk` can be had, else why not."""
    if os.geteuid() != 0:
        return "only root can mount a small disk"
    try:
        SmallDisk(directory, 65_536).remove()
    except OSError as error:
        return str(error)
    with suppress(OSError):
        directory.rmdir()
    return ""
