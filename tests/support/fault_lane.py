"""``python -m tests.support.fault_lane``: the interpreter's lane on several copies of the kernels.

Reads pairs as JSON from standard input, a directory with a copy and what its trials are called, and prints
pairs: how the lane ended (negative: by a signal) and the outcomes that it printed. Each copy has a process of
its own, forked when PyTorch and Triton are loaded, which takes longest.
"""

from __future__ import annotations

import json
import os
import sys
import tempfile
from pathlib import Path

import torch
import triton
import triton.language


def run_lane(root: str, trial: str) -> tuple[int, str]:
    """Run the lane of the copy in ``root`` in a child: its exit code, and what it printed."""
    with tempfile.TemporaryFile("w+") as output:
        pid = os.fork()
        if pid == 0:
            os.dup2(output.fileno(), sys.stdout.fileno())
            sys.path.insert(0, root)
            from kernels import interpret

            assert Path(interpret.__file__).is_relative_to(root), interpret.__file__
            code = interpret.main(["--json", "--only", trial])
            sys.stdout.flush()
            os._exit(code)
        _, status = os.waitpid(pid, 0)
        output.seek(0)
        return os.waitstatus_to_exitcode(status), output.read()


def main() -> None:
    torch.use_deterministic_algorithms(True)  # as the lane will have it; loads half of PyTorch
    assert triton.language is not None
    assert not any(name.split(".")[0] == "kernels" for name in sys.modules), "the copies would not be loaded"
    json.dump([run_lane(*lane) for lane in json.load(sys.stdin)], sys.stdout)


if __name__ == "__main__":
    main()
