"""Which form of an op serves a tensor."""

from __future__ import annotations

import os

from torch import Tensor

TORCH_OPS = "EMBERGATE_TORCH_OPS"
"""Environment variable: ops, with commas, that torch's own kernels serve on a GPU (``all``: every one)."""


def takes_triton(op: str, x: Tensor) -> bool:
    """Whether ``x``'s op runs as a Triton kernel: on a GPU, unless the environment gives that op to torch."""
    if not x.is_cuda:
        return False
    given = os.environ.get(TORCH_OPS, "")
    return not given or not {op, "all"} & set(given.split(","))
