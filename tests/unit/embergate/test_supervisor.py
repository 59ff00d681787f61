"""The supervisor with tiny processes of its own: ready, restarted, given up, stopped in order."""

from __future__ import annotations

import asyncio
import errno
import os
import signal
import sys
from pathlib import Path

import pytest

from embergate.child import ChildSpec
from embergate.config import SupervisorConfig
from embergate.refusal import Refusal
from embergate.run_state import ProcessIdentity, RunState, StateFile
from embergate.supervisor import Backoff, Supervisor
from tests.support.ports import free_port
from tests.support.waiting import eventually

QUICK = SupervisorConfig(
    ready_timeout_s=20.0,
    probe_interval_s=0.02,
    backoff_initial_s=0.05,
    backoff_max_s=0.2,
    stable_after_s=30.0,
    max_start_failures=2,
)

SERVER = """
import http.server, os, signal, sys
name, port, journal = sys.argv[1], int(sys.argv[2]), sys.argv[3]
def note(what):
    with open(journal, "a") as file:
        file.write(f"{name} {what}\\n")
class Handler(http.server.BaseHTTPRequestHandler):
    def do_GET(self):
        self.send_response(200)
        self.end_headers()
    def log_message(self, *args):
        pass
def stop(*args):
    note("stopped")
    os._exit(0)
signal.signal(signal.SIGTERM, stop)
server = http.server.HTTPServer(("127.0.0.1", port), Handler)
note("started")
server.serve_forever()
"""


def spec(name: str, tmp_path: Path, code: str = SERVER) -> ChildSpec:
    port = free_port()
    return ChildSpec(
        name=name,
        command=(sys.executable, "-S", "-c", code, name, str(port), str(tmp_path / "journal")),
        environment={},
        url=f"http://127.0.0.1:{port}",
        health_url=f"http://127.0.0.1:{port}/health",
        log=tmp_path / "logs" / f"{name}.log",
        stop_grace_s=5.0,
    )


def supervisor(
    tmp_path: Path, stages: list[list[ChildSpec]], config: SupervisorConfig = QUICK
) -> tuple[Supervisor, list[str]]:
    identity = ProcessIdentity.of(os.getpid())
    assert identity is not None
    reported: list[str] = []
    return Supervisor(stages, config, StateFile(tmp_path), identity, reported.append), reported


def read_state(tmp_path: Path) -> RunState:
    state = StateFile(tmp_path).read()
    assert state is not None
    return state


async def test_everything_becomes_ready_and_stops_in_order(tmp_path: Path) -> None:
    stages = [[spec("gateway", tmp_path)], [spec("replica-0", tmp_path), spec("replica-1", tmp_path)]]
    watcher, reported = supervisor(tmp_path, stages)

    def on_ready() -> None:
        assert read_state(tmp_path).phase == "ready"
        assert [process.status for process in read_state(tmp_path).processes] == ["ready"] * 3
        watcher.stop()

    await watcher.run(on_ready)
    *ready, stopping = reported
    assert sorted(line.split(" is ready")[0] for line in ready) == ["gateway", "replica-0", "replica-1"]
    assert stopping.startswith("Stopping: requests in flight are answered first; once more kills at once")
    stopped = [line for line in (tmp_path / "journal").read_text().splitlines() if "stopped" in line]
    assert stopped[0] == "gateway stopped"
    assert sorted(stopped[1:]) == ["replica-0 stopped", "replica-1 stopped"]
    assert [process.status for process in read_state(tmp_path).processes] == ["stopped"] * 3


LOADING = """
import http.server, json, sys, time
layers = []
class Handler(http.server.BaseHTTPRequestHandler):
    def do_GET(self):
        layers.append(1)
        is_ready = len(layers) > 20
        health = {"status": "starting", "replica_id": "r0", "stage": f"loading layer {len(layers)} of 20",
                  "fraction": len(layers) / 25}
        self.send_response(200 if is_ready else 503)
        self.end_headers()
        self.wfile.write(json.dumps(health).encode())
    def log_message(self, *args):
        pass
http.server.HTTPServer(("127.0.0.1", int(sys.argv[2])), Handler).serve_forever()
"""


async def test_a_replica_that_loads_is_quoted_now_and_then(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("embergate.supervisor._STAGE_INTERVAL_S", 0.1)
    watcher, reported = supervisor(tmp_path, [[spec("replica-0", tmp_path, LOADING)]])
    await watcher.run(watcher.stop)
    quoted = [line for line in reported if "loading" in line]
    assert 1 <= len(quoted) <= 10
    layer = int(quoted[0].split()[3])
    assert quoted[0] == f"replica-0: loading layer {layer} of 20 ({layer / 25:.0%})"


async def test_a_killed_process_is_started_again(tmp_path: Path) -> None:
    watcher, reported = supervisor(tmp_path, [[spec("replica-0", tmp_path)]])
    ready = asyncio.Event()
    running = asyncio.create_task(watcher.run(ready.set))
    await asyncio.wait_for(ready.wait(), 20)
    first = read_state(tmp_path).processes[0].identity
    assert first is not None
    os.kill(first.pid, signal.SIGKILL)

    def is_back() -> bool:
        process = read_state(tmp_path).processes[0]
        return process.status == "ready" and process.identity != first

    await eventually(is_back)
    assert read_state(tmp_path).processes[0].num_restarts == 1
    assert "replica-0 was ended by signal 9; starting it again in 0.05 s" in reported
    watcher.stop()
    await running


async def test_a_process_that_never_comes_up_ends_the_start_with_its_last_words(tmp_path: Path) -> None:
    broken = spec("gateway", tmp_path, "import sys; sys.exit('port 1 is taken: choose another')")
    watcher, _ = supervisor(tmp_path, [[broken], [spec("replica-0", tmp_path)]])
    with pytest.raises(Refusal, match=r"gateway ended with exit code 1 .* port 1 is taken: choose another"):
        await watcher.run(lambda: None)
    assert read_state(tmp_path).phase == "failed"
    assert all(process.identity is None for process in read_state(tmp_path).processes)


async def test_a_process_that_is_not_ready_in_time_ends_the_start(tmp_path: Path) -> None:
    silent = spec("gateway", tmp_path, "import time; time.sleep(60)")
    config = SupervisorConfig(ready_timeout_s=0.3, probe_interval_s=0.02)
    watcher, _ = supervisor(tmp_path, [[silent]], config)
    with pytest.raises(Refusal, match=r"gateway was not ready after 0\.3 s: see .*gateway\.log"):
        await watcher.run(lambda: None)


async def test_a_process_that_ignores_the_request_to_stop_is_killed(tmp_path: Path) -> None:
    deaf = spec("gateway", tmp_path, SERVER.replace("signal.SIGTERM, stop", "signal.SIGTERM, signal.SIG_IGN"))
    watcher, _ = supervisor(tmp_path, [[deaf]])
    ready = asyncio.Event()
    running = asyncio.create_task(watcher.run(ready.set))
    await asyncio.wait_for(ready.wait(), 20)
    identity = read_state(tmp_path).processes[0].identity
    watcher.stop()
    watcher.stop()
    await asyncio.wait_for(running, 3)
    assert identity is not None
    assert not identity.is_alive()


def test_the_backoff_doubles_up_to_its_bound_and_is_reset_by_a_stable_life() -> None:
    backoff = Backoff(SupervisorConfig(backoff_initial_s=1.0, backoff_max_s=5.0, stable_after_s=30.0))
    assert [backoff.next_delay_s(lived_s=0.1) for _ in range(5)] == [1.0, 2.0, 4.0, 5.0, 5.0]
    assert backoff.next_delay_s(lived_s=31.0) == 1.0
    assert backoff.next_delay_s(lived_s=0.1) == 2.0


async def test_a_disk_too_full_for_the_state_stops_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    watcher, reported = supervisor(tmp_path, [[spec("gateway", tmp_path)]])

    def refuse(self: StateFile, state: RunState) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(StateFile, "write", refuse)
    await watcher.run(watcher.stop)
    assert "gateway stopped" in (tmp_path / "journal").read_text()
    assert "the state of the processes cannot be written: No space left on device" in reported
