"""Free ports of the loopback address for processes that are started later.

They are none of those that the system gives to whoever asks for any port (from 32,768 on Linux): with tests
side by side it would soon give one away that was found free. Drawn at random, two runs of tests hardly choose
the same.
"""

from __future__ import annotations

import random
import socket
from contextlib import ExitStack

_FIRST, _LAST = 12_000, 32_000
_MAX_TRIES = 1_000


def free_port() -> int:
    """A port that nobody listens on right now."""
    return free_port_run(1)


def free_ports(count: int) -> list[int]:
    """``count`` different such ports."""
    first = free_port_run(count)
    return list(range(first, first + count))


def free_port_run(count: int) -> int:
    """The first of ``count`` consecutive free ports."""
    draw = random.SystemRandom()
    for _ in range(_MAX_TRIES):
        first = draw.randrange(_FIRST, _LAST - count)
        with ExitStack() as stack:
            try:
                for port in range(first, first + count):
                    stack.enter_context(socket.socket()).bind(("127.0.0.1", port))
            except OSError:
                continue
            return first
    raise OSError("no run of free ports")
