"""What is running: the lock that admits one ``up`` per data directory, and the file that tells others of it.

Processes are named by pid and start time together, so that a pid which the system gave to somebody else in
the meantime is never mistaken for ours.
"""

from __future__ import annotations

import contextlib
import fcntl
import os
import signal
import time
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Literal

import msgspec
import psutil

from embergate.refusal import Refusal

Phase = Literal["starting", "ready", "stopping", "failed"]
Status = Literal["starting", "ready", "backoff", "stopped"]

_START_TIME_TOLERANCE_S = 2.0


class ProcessIdentity(msgspec.Struct, frozen=True):
    """A process of this machine; its start time (UNIX s) tells it from later ones with the same pid."""

    pid: int
    started_at: float

    @classmethod
    def of(cls, pid: int) -> ProcessIdentity | None:
        """The identity of a running process, or None when there is none."""
        try:
            return cls(pid, psutil.Process(pid).create_time())
        except psutil.Error:
            return None

    def is_alive(self) -> bool:
        try:
            process = psutil.Process(self.pid)
            if process.status() == psutil.STATUS_ZOMBIE:
                return False
            return abs(process.create_time() - self.started_at) < _START_TIME_TOLERANCE_S
        except psutil.Error:
            return False


class ProcessState(msgspec.Struct, frozen=True, kw_only=True):
    """One supervised process as others see it."""

    name: str
    status: Status
    identity: ProcessIdentity | None
    num_restarts: int
    url: str
    log: str


class RunState(msgspec.Struct, frozen=True, kw_only=True):
    """Everything that one ``up`` runs. ``message`` says why, when ``phase`` is ``failed``."""

    supervisor: ProcessIdentity
    phase: Phase
    processes: list[ProcessState] = []
    message: str = ""


class StateFile:
    """The state of the running instance, replaced as a whole with each write."""

    def __init__(self, run_dir: Path) -> None:
        self._path = run_dir / "state.json"

    def write(self, state: RunState) -> None:
        partial = self._path.with_suffix(".partial")
        partial.write_bytes(msgspec.json.format(msgspec.json.encode(state)))
        partial.replace(self._path)

    def read(self) -> RunState | None:
        """The last state written, or None when there is none that can be read."""
        try:
            return msgspec.json.decode(self._path.read_bytes(), type=RunState)
        except (FileNotFoundError, msgspec.DecodeError):
            return None

    def remove(self) -> None:
        self._path.unlink(missing_ok=True)


class InstanceLock:
    """Held by the one supervisor of a data directory; the kernel drops it when its last holder dies."""

    def __init__(self, descriptor: int) -> None:
        self.descriptor = descriptor

    @classmethod
    def acquire(cls, run_dir: Path) -> InstanceLock:
        """Take the lock.

        Raises:
            Refusal: when another supervisor holds it.
        """
        run_dir.mkdir(parents=True, exist_ok=True)
        descriptor = os.open(run_dir / "lock", os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            os.close(descriptor)
            state = StateFile(run_dir).read()
            who = f" (process {state.supervisor.pid})" if state else ""
            raise Refusal(
                f"Embergate already runs with this data directory{who}: "
                "see `make status`, stop it with `make down`."
            ) from None
        return cls(descriptor)

    @classmethod
    def inherit(cls, descriptor: int) -> InstanceLock:
        """Go on holding the lock that the parent process passed as an open descriptor."""
        os.set_inheritable(descriptor, False)
        return cls(descriptor)

    def release(self) -> None:
        """Close this process's hold; a child that inherited the descriptor keeps the lock."""
        with contextlib.suppress(OSError):
            os.close(self.descriptor)


def is_locked(run_dir: Path) -> bool:
    """Whether a supervisor holds the lock of this data directory."""
    try:
        InstanceLock.acquire(run_dir).release()
    except Refusal:
        return True
    return False


def stop_leftovers(state: RunState | None, term_timeout_s: float) -> list[str]:
    """End the processes that a killed supervisor left behind, first politely, then hard, with their children.

    Returns:
        The names of the processes that were still alive.
    """
    if state is None:
        return []
    left = _alive(state.processes)
    for identity in left.values():
        with contextlib.suppress(ProcessLookupError, PermissionError):
            os.kill(identity.pid, signal.SIGTERM)
    wait_until(lambda: not any(identity.is_alive() for identity in left.values()), term_timeout_s)
    for identity in left.values():
        kill_group(identity.pid)
    return list(left)


def kill_group(pid: int) -> None:
    """Kill what is left of a child's process group; each child leads one, its own children are in it."""
    with contextlib.suppress(ProcessLookupError, PermissionError):
        os.killpg(pid, signal.SIGKILL)


def wait_until(is_done: Callable[[], bool], timeout_s: float, interval_s: float = 0.05) -> bool:
    """Poll until ``is_done`` or the time is up; returns the last answer."""
    deadline = time.monotonic() + timeout_s
    while not is_done():
        if time.monotonic() >= deadline:
            return False
        time.sleep(interval_s)
    return True


def _alive(processes: Iterable[ProcessState]) -> dict[str, ProcessIdentity]:
    """Name -> identity of those that still run."""
    return {
        process.name: process.identity
        for process in processes
        if process.identity is not None and process.identity.is_alive()
    }
