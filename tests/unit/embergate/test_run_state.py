"""One instance per data directory, and no stranger is ever mistaken for one of ours."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from embergate.refusal import Refusal
from embergate.run_state import (
    InstanceLock,
    ProcessIdentity,
    ProcessState,
    RunState,
    StateFile,
    is_locked,
    stop_leftovers,
)


@pytest.fixture
def sleeper() -> Iterator[subprocess.Popen[bytes]]:
    process = subprocess.Popen(
        [sys.executable, "-S", "-c", "import time; time.sleep(60)"], start_new_session=True
    )
    yield process
    process.kill()
    process.wait()


def state_of(identity: ProcessIdentity | None) -> RunState:
    process = ProcessState(
        name="replica-0", status="ready", identity=identity, num_restarts=0, url="http://x", log="x.log"
    )
    return RunState(supervisor=ProcessIdentity(1, 0.0), phase="ready", processes=[process])


def identity_of(pid: int) -> ProcessIdentity:
    identity = ProcessIdentity.of(pid)
    assert identity is not None
    return identity


def test_a_second_lock_is_refused_with_the_way_out(tmp_path: Path) -> None:
    lock = InstanceLock.acquire(tmp_path / "run")
    assert is_locked(tmp_path / "run")
    with pytest.raises(Refusal, match=r"already runs .* stop it with `make down`"):
        InstanceLock.acquire(tmp_path / "run")
    lock.release()
    assert not is_locked(tmp_path / "run")
    InstanceLock.acquire(tmp_path / "run").release()


def test_a_state_is_read_as_it_was_written(tmp_path: Path) -> None:
    file = StateFile(tmp_path)
    assert file.read() is None
    state = state_of(identity_of(os.getpid()))
    file.write(state)
    assert file.read() == state
    (tmp_path / "state.json").write_text("{torn")
    assert file.read() is None
    file.remove()
    file.remove()


def test_a_leftover_is_stopped(sleeper: subprocess.Popen[bytes]) -> None:
    assert stop_leftovers(state_of(identity_of(sleeper.pid)), term_timeout_s=5) == ["replica-0"]
    assert sleeper.wait(5) != 0


def test_a_recycled_pid_is_left_alone(sleeper: subprocess.Popen[bytes]) -> None:
    other = ProcessIdentity(sleeper.pid, identity_of(sleeper.pid).started_at - 100)
    assert not other.is_alive()
    assert stop_leftovers(state_of(other), term_timeout_s=1) == []
    assert sleeper.poll() is None


def test_nothing_is_left_of_nothing() -> None:
    assert stop_leftovers(None, term_timeout_s=1) == []
    assert stop_leftovers(state_of(None), term_timeout_s=1) == []
