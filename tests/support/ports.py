"""Free ports of the loopback address."""

from __future__ import annotations

import socket
from contextlib import ExitStack


def free_port() -> int:
    """A port that nobody listens on right now."""
    return free_ports(1)[0]


def free_ports(count: int) -> list[int]:
    """``count`` different such ports."""
    with ExitStack() as stack:
        sockets = [stack.enter_context(socket.socket()) for _ in range(count)]
        for listener in sockets:
            listener.bind(("127.0.0.1", 0))
        return [listener.getsockname()[1] for listener in sockets]


def free_port_run(count: int) -> int:
    """The first of ``count`` consecutive free ports."""
    for base in range(20_000, 32_000, count):
        with ExitStack() as stack:
            try:
                for port in range(base, base + count):
                    stack.enter_context(socket.socket()).bind(("127.0.0.1", port))
            except OSError:
                continue
            return base
    raise OSError("no run of free ports")
