"""The process of one replica: logging, uvloop, signals, exit code.

``python -m backend`` reads its configuration as JSON from standard input; ``embergate serve replica`` calls
:func:`run` with the one it made from ``config.yaml``.
"""

from __future__ import annotations

import asyncio
import os
import signal
import sys

import msgspec
import uvloop

from backend.config import BackendConfig
from backend.server import ReplicaServer, ReplicaStartError
from backend.telemetry import configure_logging


def run(config: BackendConfig) -> int:
    """Run one replica in this process until it is stopped; the exit code.

    0 after SIGTERM or SIGINT; 1 when it cannot start or when its engine ended, with one sentence on standard
    error.
    """
    configure_logging(config.replica_id, config.telemetry.log_level)
    # Prompts are encoded one at a time; a pool of threads would only take cores from the engine.
    os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
    try:
        return uvloop.run(_serve(config))
    except ReplicaStartError as error:
        sys.stderr.write(f"replica {config.replica_id}: {error}\n")
        return 1


async def _serve(config: BackendConfig) -> int:
    server = ReplicaServer(config)
    loop = asyncio.get_running_loop()
    for name in (signal.SIGTERM, signal.SIGINT):
        loop.add_signal_handler(name, server.request_stop)
    await server.listen()
    return await server.serve()


def main() -> int:
    """Read the configuration from standard input and run."""
    try:
        config = msgspec.json.decode(sys.stdin.buffer.read(), type=BackendConfig)
    except msgspec.DecodeError as error:
        sys.stderr.write(f"configuration on standard input: {error}\n")
        return 1
    return run(config)


if __name__ == "__main__":
    sys.exit(main())
