"""A scripted replica as a process of its own: ``python -m tests.support.replica_process ID PORT DELAY_S``."""

from __future__ import annotations

import asyncio
import sys

from tests.support.fake_replica import FakeReplica, Script


async def serve(replica_id: str, port: int, token_delay_s: float) -> None:
    """Answer until the process is killed."""
    replica = FakeReplica(replica_id)
    replica.script = Script(token_delay_s=token_delay_s)
    await replica.start(port)
    await asyncio.Event().wait()


if __name__ == "__main__":
    asyncio.run(serve(sys.argv[1], int(sys.argv[2]), float(sys.argv[3])))
