"""A rank besides the first: ``python -m backend.parallel.follower``, started by the first.

It does what its standard input says, in order, and ends when that ends. The other ranks notice its end by
their broken connections.

Exit codes: 0 when the first rank closed its input, 1 when anything failed.
"""

from __future__ import annotations

import logging
import signal
import sys
from collections.abc import Iterator
from typing import BinaryIO

import msgspec

from backend.engine.frames import FrameBuffer
from backend.engine.worker import describe_failure
from backend.parallel.group import join_meeting
from backend.parallel.messages import AllocateKv, JoinRanks, RunStep, ToRank
from backend.parallel.ranks import join_and_load
from backend.telemetry import configure_logging

_READ_BYTES = 1 << 18
_logger = logging.getLogger("backend.parallel")


def read_messages(stream: BinaryIO) -> Iterator[ToRank]:
    """The messages on a stream, as they come, until it ends."""
    frames, decoder = FrameBuffer(), msgspec.msgpack.Decoder(ToRank)
    while data := stream.read1(_READ_BYTES):  # type: ignore[attr-defined]
        yield from (decoder.decode(payload) for payload in frames.feed(data))


def follow(messages: Iterator[ToRank]) -> None:
    """Join, load, and compute what the first rank plans."""
    first = next(messages, None)
    if not isinstance(first, JoinRanks):
        return
    config = first.config
    configure_logging(f"{config.replica_id} rank {first.rank}", config.telemetry.log_level)
    store = join_meeting(first.port, config.start_timeout_s)
    runner, _, _ = join_and_load(config, first.rank, store)
    for message in messages:
        if isinstance(message, RunStep):
            runner.execute(message.plan)
        elif isinstance(message, AllocateKv):
            runner.allocate_kv(message.num_blocks, message.block_size)


def main() -> int:
    """Leave signals to the first rank's parent, and follow."""
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, signal.SIG_IGN)
    try:
        follow(read_messages(sys.stdin.buffer))
    except Exception as error:  # noqa: BLE001  the top guard of this process
        _logger.critical("a rank failed: %s", describe_failure(error))
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
