"""Plain torch form of SwiGLU's gate."""

from __future__ import annotations

from torch import Tensor
from torch.nn.functional import silu


def silu_mul(gate_up: Tensor) -> Tensor:
    """See :func:`kernels.silu_mul.silu_mul`."""
    gate, up = gate_up.chunk(2, dim=-1)
    return silu(gate) * up
