"""Plain torch forms of the normalisation."""

from __future__ import annotations

import torch
from torch import Tensor


def rms_norm(x: Tensor, weight: Tensor | None, eps: float) -> Tensor:
    """See :func:`kernels.rms_norm.rms_norm`."""
    wide = x.float()
    normed = wide * torch.rsqrt(wide.square().mean(-1, keepdim=True) + eps)
    if weight is not None:
        normed = normed * weight.float()
    return normed.to(x.dtype)


def add_rms_norm(x: Tensor, residual: Tensor, weight: Tensor | None, eps: float) -> Tensor:
    """See :func:`kernels.rms_norm.add_rms_norm`."""
    residual.add_(x)
    return rms_norm(residual, weight, eps)
