"""Root-mean-square normalisation, alone or after a residual addition."""

from __future__ import annotations

import torch
from torch import Tensor

from kernels.dispatch import takes_triton
from kernels.native import NativeLibrary, address, require_rows
from kernels.rms_norm import reference


def rms_norm(x: Tensor, weight: Tensor | None, eps: float, *, native: NativeLibrary | None = None) -> Tensor:
    """``y = x / sqrt(mean(x^2) + eps) * weight`` over the last dimension (Zhang and Sennrich, 2019).

    Args:
        x: ``[rows, width]``.
        weight: ``[width]``; None stands for ones.
        eps: added to the mean square.

    Returns:
        ``[rows, width]``, a new tensor of ``x``'s dtype; the mean is taken in float32.

    Raises:
        ValueError: when the native form is given something else than contiguous float32 CPU tensors, or
            ``weight`` does not have the width of ``x``.
    """
    if takes_triton("rms_norm", x):
        from kernels.rms_norm import kernel

        return kernel.rms_norm(x, weight, eps)
    if native is None:
        return reference.rms_norm(x, weight, eps)
    rows, width = require_rows("x", x)
    out = torch.empty_like(x)
    native.rms_norm(x.data_ptr(), 0, address("weight", weight, (width,)), eps, out.data_ptr(), rows, width)
    return out


def add_rms_norm(
    x: Tensor, residual: Tensor, weight: Tensor | None, eps: float, *, native: NativeLibrary | None = None
) -> Tensor:
    """Add ``x`` to ``residual`` **in place**, then return :func:`rms_norm` of the sum.

    ``x`` and ``residual`` are ``[rows, width]``. Raises as :func:`rms_norm` does.
    """
    if takes_triton("rms_norm", x):
        from kernels.rms_norm import kernel

        return kernel.add_rms_norm(x, residual, weight, eps)
    if native is None:
        return reference.add_rms_norm(x, residual, weight, eps)
    rows, width = require_rows("x", x)
    residual_at = address("residual", residual, (rows, width))
    out = torch.empty_like(x)
    weight_at = address("weight", weight, (width,))
    native.rms_norm(x.data_ptr(), residual_at, weight_at, eps, out.data_ptr(), rows, width)
    return out
