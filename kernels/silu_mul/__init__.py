"""The gate of SwiGLU: ``silu(gate) * up``."""

from __future__ import annotations

import torch
from torch import Tensor

from kernels.dispatch import takes_triton
from kernels.native import NativeLibrary, require_rows
from kernels.silu_mul import reference


def silu_mul(gate_up: Tensor, *, native: NativeLibrary | None = None) -> Tensor:
    """``gate * sigmoid(gate) * up`` of the two halves of the last dimension (Shazeer, 2020).

    Args:
        gate_up: ``[rows, 2 * width]``, all gates before all ups.

    Returns:
        ``[rows, width]``, a new tensor.

    Raises:
        ValueError: when the native form is given something else than a contiguous float32 CPU tensor, or the
            last dimension is odd.
    """
    if gate_up.shape[-1] % 2:
        raise ValueError(f"gate_up needs an even last dimension, not {gate_up.shape[-1]}")
    if takes_triton("silu_mul", gate_up):
        from kernels.silu_mul import kernel

        return kernel.silu_mul(gate_up)
    if native is None:
        return reference.silu_mul(gate_up)
    rows, twice = require_rows("gate_up", gate_up)
    out = torch.empty((rows, twice // 2))
    native.silu_mul(gate_up.data_ptr(), out.data_ptr(), rows, twice // 2)
    return out
