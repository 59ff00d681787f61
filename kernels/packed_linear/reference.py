"""Plain torch forms: dequantise, then multiply."""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn.functional import linear

from kernels.packed_linear.weight import PackedWeight


def packed_linear(x: Tensor, weight: PackedWeight, out: Tensor | None, accumulate: bool) -> Tensor:
    """See :func:`kernels.packed_linear.packed_linear`."""
    y = linear(x, weight.dequantize())
    if out is None:
        return y
    return out.add_(y) if accumulate else out.copy_(y)


def packed_head_linear(x: Tensor, weight: PackedWeight, groups: int) -> Tensor:
    """See :func:`kernels.packed_linear.packed_head_linear`."""
    tokens, heads, width = x.shape
    matrices = weight.dequantize().view(groups, -1, width)
    grouped = x.view(tokens, groups, heads // groups, width)
    return torch.einsum("tghk,gnk->tghn", grouped, matrices).reshape(tokens, heads, -1)


def packed_embedding(token_ids: Tensor, weight: PackedWeight) -> Tensor:
    """See :func:`kernels.packed_linear.packed_embedding`."""
    return weight.dequantize_rows(token_ids)
