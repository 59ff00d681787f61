"""The processes that a measurement of gateways needs: the upstream, the peers, and what they cost.

Each is pinned to a core, leads a process group of its own, and is killed by the kernel when the benchmark
dies.
"""

from __future__ import annotations

import os
import shutil
import signal
import socket
import subprocess
import time
import urllib.error
import urllib.request
from collections.abc import Iterator, Sequence
from contextlib import suppress
from pathlib import Path

import msgspec

UPSTREAM_PORT = 9000
LOAD_CORE, GATEWAY_CORE = 0, 1
_CHAT = "/v1/chat/completions"
_START_S = 60.0
_STOP_S = 20.0
_NANOS = 1e9


class PortBusyError(RuntimeError):
    """Something else listens where the benchmark would."""


class Peer(msgspec.Struct, frozen=True):
    """A gateway to measure; ``command`` is empty for the upstream itself."""

    name: str
    port: int
    command: tuple[str, ...] = ()
    path: str = _CHAT


def known_peers(bench_dir: Path, peers_dir: Path) -> dict[str, Peer]:
    """The peers that the harness can install, by name."""
    upstream = f"http://127.0.0.1:{UPSTREAM_PORT}"
    aiohttp = (f"{peers_dir}/aiohttp/bin/python", f"{bench_dir}/gateway/aio_proxy.py")
    peers = [
        Peer("direct", UPSTREAM_PORT),
        Peer("nginx", 9001, ("/usr/sbin/nginx", "-c", f"{peers_dir}/nginx.conf")),
        Peer("aiohttp", 9002, (*aiohttp, "9002", upstream)),
        Peer("aiohttp-inspect", 9003, (*aiohttp, "9003", upstream, "inspect")),
    ]
    launchers = {
        "sglang-router": (
            (f"{peers_dir}/sglrouter/bin/python", "-m", "sglang_router.launch_router"),
            "warn",
            9004,
        ),
        "vllm-router": ((f"{peers_dir}/vllmrouter/bin/vllm-router",), "warning", 9006),
    }
    for router, (launcher, level, first_port) in launchers.items():
        for offset, (suffix, policy) in enumerate((("rr", "round_robin"), ("cache", "cache_aware"))):
            port = first_port + offset
            options = {
                "host": "127.0.0.1",
                "port": str(port),
                "worker-urls": upstream,
                "policy": policy,
                "log-level": level,
                "prometheus-port": str(port + 20_000),
            }
            flags = [word for name, value in options.items() for word in (f"--{name}", value)]
            peers.append(Peer(f"{router}-{suffix}", port, (*launcher, *flags)))
    return {peer.name: peer for peer in peers}


def require_free(ports: Sequence[int]) -> None:
    """Raises PortBusyError."""
    for port in ports:
        with socket.socket() as probe:
            if probe.connect_ex(("127.0.0.1", port)) == 0:
                raise PortBusyError(f"port {port} is in use: stop what listens there and start again")


class Pinned:
    """A process on one core."""

    def __init__(self, core: int, command: Sequence[str], log: Path, environment: dict[str, str]) -> None:
        tied = ["setpriv", "--pdeathsig", "KILL"] if shutil.which("setpriv") else []
        with log.open("wb") as file:
            self._process = subprocess.Popen(
                [*tied, "taskset", "-c", str(core), *command],
                stdout=file,
                stderr=file,
                env=environment,
                cwd=log.parent,
                start_new_session=True,
            )
        self._log = log

    def wait_until_answers(self, port: int, path: str, body: bytes) -> None:
        """Raises RuntimeError with the end of its log when it does not come up."""
        headers = {"content-type": "application/json", "authorization": "Bearer sk-bench"}
        request = urllib.request.Request(f"http://127.0.0.1:{port}{path}", body, headers)
        deadline = time.monotonic() + _START_S
        while time.monotonic() < deadline and self._process.poll() is None:
            with suppress(OSError, urllib.error.URLError):
                urllib.request.urlopen(request, timeout=5.0).read()
                return
            time.sleep(0.1)
        raise RuntimeError(f"{self._log.stem} did not come up: {self._log.read_text()[-500:]}")

    def stop(self) -> None:
        """Ask, then kill; the whole group."""
        for number in (signal.SIGTERM, signal.SIGKILL):
            with suppress(ProcessLookupError):
                os.killpg(self._process.pid, number)
            with suppress(subprocess.TimeoutExpired):
                self._process.wait(_STOP_S)
        with suppress(ProcessLookupError):
            os.killpg(self._process.pid, signal.SIGKILL)

    def cpu_seconds(self) -> float:
        """What all of its threads and children have used so far."""
        nanos = 0
        for pid in self._pids():
            for stat in Path(f"/proc/{pid}/task").glob("*/schedstat"):
                with suppress(OSError):
                    nanos += int(stat.read_text().split()[0])
        return nanos / _NANOS

    def memory_mb(self) -> float:
        """Proportional set size."""
        kilobytes = 0
        for pid in self._pids():
            with suppress(OSError):
                lines = Path(f"/proc/{pid}/smaps_rollup").read_text().splitlines()
                kilobytes += sum(int(line.split()[1]) for line in lines if line.startswith("Pss:"))
        return kilobytes / 1024

    def _pids(self) -> Iterator[int]:
        """Every process of the group."""
        for entry in Path("/proc").iterdir():
            if entry.name.isdigit():
                with suppress(OSError, ValueError):
                    if os.getpgid(int(entry.name)) == self._process.pid:
                        yield int(entry.name)
