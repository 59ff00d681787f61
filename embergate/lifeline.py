"""Ties a child process to the life of its supervisor.

The supervisor holds the writing end of a pipe that is the child's standard input. When the supervisor is
gone, however it went, the kernel closes the pipe; the child reads the end of file and stops as if asked to.
"""

from __future__ import annotations

import os
import signal
import threading
import time

LIFELINE_VARIABLE = "EMBERGATE_LIFELINE"


def hold_lifeline(grace_s: float) -> None:
    """Stop this process with SIGTERM once its standard input ends, and hard ``grace_s`` seconds later."""
    threading.Thread(target=_wait_for_the_end, args=(grace_s,), name="lifeline", daemon=True).start()


def _wait_for_the_end(grace_s: float) -> None:
    while True:
        try:
            if not os.read(0, 4096):
                break
        except OSError:
            break
    os.kill(os.getpid(), signal.SIGTERM)
    time.sleep(grace_s)
    os._exit(1)
