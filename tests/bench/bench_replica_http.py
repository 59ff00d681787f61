"""Measures what a streamed token costs in a replica's HTTP process: run it as a module.

The engine is a process of its own that makes tokens at a steady pace, the reader another; what is counted is
the CPU time of the process between them, all of it: reading the engine's frames, text, encoding, sending.

Options: --pace SECONDS per step, --tokens N per stream, --streams N ...
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import json
import sys
import tempfile
import time
from pathlib import Path

import uvloop

from backend.config import BackendConfig, ModelSource, SchedulerConfig
from backend.engine.client import EngineClient
from backend.http.engine_port import Engine
from backend.server import ReplicaServer
from tests.unit.backend.conftest import CHATML, make_definition

_ENGINE = "tests.support.paced_engine"


async def _start_engine(config: BackendConfig, report: object) -> Engine:
    return await EngineClient.start(config, worker_module=_ENGINE)


async def _read_streams(port: int, num_streams: int, num_tokens: int) -> int:
    """Open the streams at once and read them to their ends; bytes read."""

    async def read_one(number: int) -> int:
        reader, writer = await asyncio.open_connection("127.0.0.1", port, limit=1 << 22)
        body = json.dumps(
            {
                "request_id": f"r{number}",
                "model": "@cf/embergate/bench",
                "messages": [{"role": "user", "content": "hi"}],
                "stream": True,
                "max_tokens": num_tokens,
            }
        ).encode()
        head = f"POST /v1/chat/completions HTTP/1.1\r\nHost: x\r\nContent-Length: {len(body)}\r\n\r\n"
        writer.write(head.encode() + body)
        received = 0
        tail = b""
        while b"[DONE]" not in tail:
            data = await reader.read(1 << 16)
            if not data:
                raise ConnectionError("the stream was cut off")
            received += len(data)
            tail = (tail + data)[-64:]
        writer.close()
        return received

    return sum(await asyncio.gather(*(read_one(number) for number in range(num_streams))))


async def _measure(directory: Path, pace_s: float, num_streams: int, num_tokens: int) -> None:
    config = BackendConfig(
        replica_id="bench",
        model=ModelSource(path=str(directory), served_as="@cf/embergate/bench"),
        port=0,
        scheduler=SchedulerConfig(max_queue_wait_s=pace_s),
    )
    server = ReplicaServer(config, start=_start_engine)
    await server.listen()
    await server.load()
    arguments = ["--read", str(server.port), "--streams", str(num_streams), "--tokens", str(num_tokens)]
    began, cpu = time.perf_counter(), time.process_time()
    reader = await asyncio.create_subprocess_exec(
        sys.executable, "-m", "tests.bench.bench_replica_http", *arguments
    )
    exit_code = await reader.wait()
    cpu, wall = time.process_time() - cpu, time.perf_counter() - began
    await server.close()
    if exit_code:
        raise SystemExit("the reader failed")
    per_token_us = cpu / (num_streams * num_tokens) * 1e6
    print(
        f"{num_streams:4d} streams of {num_tokens} tokens: {per_token_us:6.1f} us CPU per token, {wall:.1f} s"
    )


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--pace", type=float, default=0.005)
    parser.add_argument("--tokens", type=int, default=400)
    parser.add_argument("--streams", type=int, nargs="+", default=[1, 8, 32])
    parser.add_argument("--read", type=int, default=0, metavar="PORT", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.read:
        uvloop.run(_read_streams(options.read, options.streams[0], options.tokens))
        return
    with tempfile.TemporaryDirectory() as name:
        directory = Path(name)
        (directory / "tokenizer.json").write_text(json.dumps(make_definition()))
        (directory / "chat_template.jinja").write_text(CHATML)
        for num_streams in options.streams:
            uvloop.run(_measure(directory, options.pace, num_streams, options.tokens))


if __name__ == "__main__":
    with contextlib.suppress(KeyboardInterrupt):
        main()
