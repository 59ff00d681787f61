"""Plain torch forms of the permutation."""

from __future__ import annotations

import torch
from torch import Tensor


def sort_pairs(experts: Tensor, num_experts: int) -> tuple[Tensor, Tensor, Tensor]:
    """``order``, ``places`` and ``starts`` of :class:`kernels.moe_permute.Permutation`."""
    pairs = experts.flatten().long()
    order = pairs.sort(stable=True).indices
    places = torch.empty_like(order)
    places[order] = torch.arange(len(order), device=order.device)
    ends = (pairs[:, None] == torch.arange(num_experts, device=order.device)).sum(0).cumsum(0)
    return order.int(), places.int(), torch.nn.functional.pad(ends, (1, 0)).int()


def moe_unpermute(y: Tensor, places: Tensor, weights: Tensor) -> Tensor:
    """See :func:`kernels.moe_permute.moe_unpermute`."""
    chosen = y[places.long()].view(*weights.shape, -1).float()
    return (chosen * weights[..., None]).sum(1).to(y.dtype)
