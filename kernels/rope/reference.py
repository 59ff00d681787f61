"""Plain torch form of the rotation."""

from __future__ import annotations

import torch
from torch import Tensor


def rope(x: Tensor, cos: Tensor, sin: Tensor, *, interleaved: bool) -> None:
    """See :func:`kernels.rope.rope`."""
    wide = x.float()
    cos, sin = cos[:, None, :], sin[:, None, :]
    if interleaved:
        first, second = wide[..., 0::2], wide[..., 1::2]
        rotated = torch.stack((first * cos - second * sin, first * sin + second * cos), dim=-1).flatten(-2)
    else:
        first, second = wide.chunk(2, dim=-1)
        rotated = torch.cat((first * cos - second * sin, first * sin + second * cos), dim=-1)
    x.copy_(rotated)
