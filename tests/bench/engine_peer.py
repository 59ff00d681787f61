"""llama.cpp's own server on the same GGUF, in an environment of its own, through the package xllamacpp."""

from __future__ import annotations

import http.client
import json
import os
import subprocess
import sys
import threading
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from backend.engine.client import ENGINE_ENVIRONMENT
from tests.support.ports import free_port

START_TIMEOUT_S = 120.0
REQUEST_TIMEOUT_S = 600.0

_SERVER = """
import sys, threading, xllamacpp
path, port, slots, context, threads = sys.argv[1], *map(int, sys.argv[2:])
params = xllamacpp.CommonParams()
params.model.path = path
params.n_ctx = context * slots
params.n_parallel = slots
params.cpuparams.n_threads = threads
params.cpuparams_batch.n_threads = threads
params.hostnames = ["127.0.0.1"]
params.port = port
params.cont_batching = True
params.verbosity = 0
server = xllamacpp.Server(params)
print("listening", flush=True)
threading.Event().wait()
"""


@dataclass(frozen=True)
class Timeline:
    """When a request was sent and when each of its tokens arrived, in seconds."""

    sent: float
    arrivals: tuple[float, ...]
    num_cached: int


def peers_dir() -> Path:
    return Path(os.environ.get("EMBERGATE_PEERS", Path.home() / ".cache/embergate-peers"))


@contextmanager
def llama_server(gguf: Path, threads: int, num_slots: int, context: int) -> Iterator[LlamaClient]:
    """Start the server, installing it first where it is missing; stop it afterwards."""
    python = _environment(peers_dir() / "xllama")
    port = free_port()
    arguments = [str(gguf), str(port), str(num_slots), str(context), str(threads)]
    # Our own engine's defaults for OpenMP are not the peer's.
    environment = {name: value for name, value in os.environ.items() if name not in ENGINE_ENVIRONMENT}
    command = [str(python), "-c", _SERVER, *arguments]
    process = subprocess.Popen(command, env=environment, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    try:
        client = LlamaClient(port)
        client.wait_until_ready(process)
        yield client
    finally:
        process.kill()
        process.wait()


class LlamaClient:
    """Completions from token ids, one connection each."""

    def __init__(self, port: int) -> None:
        self._port = port

    def wait_until_ready(self, process: subprocess.Popen[bytes]) -> None:
        deadline = time.monotonic() + START_TIMEOUT_S
        while time.monotonic() < deadline:
            if process.poll() is not None:
                raise RuntimeError(f"llama.cpp's server ended with code {process.returncode}")
            try:
                self.complete([1, 2, 3], 1)
            except (OSError, http.client.HTTPException, RuntimeError):
                time.sleep(0.2)
            else:
                return
        raise RuntimeError(f"llama.cpp's server was not ready within {START_TIMEOUT_S} s")

    def complete(self, prompt: Sequence[int], num_tokens: int, *, use_cache: bool = False) -> Timeline:
        body = {
            "prompt": list(prompt),
            "n_predict": num_tokens,
            "temperature": 0,
            "stream": True,
            "ignore_eos": True,
            "cache_prompt": use_cache,
        }
        connection = http.client.HTTPConnection("127.0.0.1", self._port, timeout=REQUEST_TIMEOUT_S)
        sent, arrivals, num_cached = time.perf_counter(), [], 0
        try:
            connection.request("POST", "/completion", json.dumps(body), {"content-type": "application/json"})
            response = connection.getresponse()
            if response.status != http.client.OK:
                raise RuntimeError(f"status {response.status}: {response.read()[:200]!r}")
            while line := response.readline():
                if not line.startswith(b"data: {"):
                    continue
                event = json.loads(line[6:])
                if event.get("stop"):
                    num_cached = int(event.get("timings", {}).get("cache_n", 0))
                    break
                arrivals.append(time.perf_counter())
        finally:
            connection.close()
        return Timeline(sent, tuple(arrivals), num_cached)

    def complete_together(self, prompts: Sequence[Sequence[int]], num_tokens: int) -> list[Timeline]:
        timelines: dict[int, Timeline] = {}

        def run(index: int) -> None:
            timelines[index] = self.complete(prompts[index], num_tokens)

        threads = [threading.Thread(target=run, args=(index,)) for index in range(len(prompts))]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        return [timelines[index] for index in range(len(prompts))]


def _environment(directory: Path) -> Path:
    python = directory / "bin/python"
    if not python.exists():
        print(f"installing llama.cpp (xllamacpp) into {directory} ...", flush=True)
        subprocess.run([sys.executable, "-m", "venv", str(directory)], check=True)
    has_package = subprocess.run([str(python), "-c", "import xllamacpp"], capture_output=True, check=False)
    if has_package.returncode:
        subprocess.run([str(python), "-m", "pip", "install", "-q", "xllamacpp"], check=True)
    return python
