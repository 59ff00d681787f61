"""Measures gateways in short slices that take turns: what disturbs one disturbs its neighbour as well."""

from __future__ import annotations

import json
import os
import subprocess
import time
from collections.abc import Iterator, Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import Any

from tests.bench.gateway_processes import (
    GATEWAY_CORE,
    LOAD_CORE,
    UPSTREAM_PORT,
    Peer,
    Pinned,
    require_free,
)
from tests.bench.gateway_report import Measurement

SCENARIOS = (("plain", 1), ("plain", 16), ("plain", 64), ("stream", 16), ("paced", 64))
_CHUNKS, _INTERVAL_US = "64", "5000"


class Bench:
    """Upstream, peers and load client. A context manager: leaves no process behind."""

    def __init__(self, bench_dir: Path, peers_dir: Path, peers: Sequence[Peer], logs: Path) -> None:
        """Raises PortBusyError."""
        self._bodies = bench_dir / "gateway"
        self._load_client = peers_dir / "loadgen"
        self._upstream_command = (str(peers_dir / "mock_upstream"), str(UPSTREAM_PORT), _CHUNKS, _INTERVAL_US)
        self._environment = os.environ | {"HOME": str(peers_dir / "home"), "NO_PROXY": "*"}
        self._peers = list(peers)
        self._logs = logs
        self._running: dict[str, Pinned] = {}
        self._cleanup = ExitStack()
        require_free([UPSTREAM_PORT, *(peer.port for peer in peers if peer.command)])

    def __enter__(self) -> Bench:
        with ExitStack() as stack:
            upstream = self._start(stack, "upstream", LOAD_CORE, self._upstream_command)
            time.sleep(0.2)
            body = (self._bodies / "body_plain.json").read_bytes()
            for peer in self._peers:
                process = upstream
                if peer.command:
                    process = self._start(stack, peer.name, GATEWAY_CORE, peer.command)
                process.wait_until_answers(peer.port, peer.path, body)
                self._running[peer.name] = process
            self._cleanup = stack.pop_all()
        return self

    def __exit__(self, *error: object) -> None:
        self._cleanup.close()

    def measure(self, rounds: int, seconds: float) -> Iterator[Measurement]:
        """Each round visits every scenario; within it the peers follow one another, in turning order."""
        for number in range(rounds):
            for kind, concurrency in SCENARIOS:
                for peer in self._peers if number % 2 == 0 else reversed(self._peers):
                    yield self._slice(number, peer, kind, concurrency, seconds)

    def _start(self, stack: ExitStack, name: str, core: int, command: Sequence[str]) -> Pinned:
        process = Pinned(core, command, self._logs / f"{name}.log", self._environment)
        stack.callback(process.stop)
        return process

    def _slice(self, number: int, peer: Peer, kind: str, concurrency: int, seconds: float) -> Measurement:
        process = self._running[peer.name]
        body = self._bodies / f"body_{kind}.json"
        target = ("127.0.0.1", str(peer.port), peer.path, str(concurrency), str(seconds), str(body))
        busy, cpu, started = _busy_seconds(), process.cpu_seconds(), time.monotonic()
        load = subprocess.run(
            ["taskset", "-c", str(LOAD_CORE), str(self._load_client), *target],
            stdout=subprocess.PIPE,
            check=True,
        )
        wall = time.monotonic() - started
        cpu = process.cpu_seconds() - cpu
        seen: dict[str, Any] = json.loads(load.stdout)
        num_requests = max(seen["done"] * wall / seen["secs"], 1.0)  # those of the warm-up as well
        busy_share = (_busy_seconds() - busy) / wall
        return Measurement(
            gw=peer.name,
            kind=kind,
            conc=concurrency,
            number=number,
            done=seen["done"],
            rps=seen["rps"],
            p50=seen["p50"],
            p99=seen["p99"],
            ttft50=seen["ttft50"],
            cpu_per_1k=cpu / num_requests * 1000,
            pss=process.memory_mb(),
            err=seen["err"],
            busy=busy_share,
        )


def _busy_seconds() -> float:
    """What all cores of the machine have been busy for."""
    ticks = [int(word) for word in Path("/proc/stat").read_text().split("\n", 1)[0].split()[1:9]]
    return (sum(ticks) - ticks[3] - ticks[4]) / os.sysconf("SC_CLK_TCK")
