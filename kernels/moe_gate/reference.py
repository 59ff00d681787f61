"""Plain torch form of the router."""

from __future__ import annotations

import torch
from torch import Tensor


def moe_gate(
    logits: Tensor,
    bias: Tensor | None,
    top_k: int,
    num_groups: int,
    top_groups: int,
    normalise: bool,
    scale: float,
) -> tuple[Tensor, Tensor]:
    """See :func:`kernels.moe_gate.moe_gate`."""
    tokens, experts = logits.shape
    scores = torch.sigmoid(logits.float())
    choice = scores if bias is None else scores + bias
    if top_groups < num_groups:
        grouped = choice.view(tokens, num_groups, -1)
        best_two = grouped.topk(min(2, grouped.shape[2]), dim=-1).values.sum(-1)
        kept = best_two.sort(dim=-1, descending=True, stable=True).indices[:, :top_groups]
        allowed = torch.zeros((tokens, num_groups), dtype=torch.bool, device=logits.device).scatter_(
            1, kept, True
        )
        choice = choice.masked_fill(~allowed.repeat_interleave(experts // num_groups, dim=1), -torch.inf)
    chosen = choice.sort(dim=-1, descending=True, stable=True).indices[:, :top_k]
    weights = scores.gather(1, chosen)
    if normalise:
        weights = weights / (weights.sum(-1, keepdim=True) + 1e-20)
    return weights * scale, chosen.int()


def weigh_all(logits: Tensor, num_leading: int, normalise: bool, scale: float) -> Tensor:
    """See :func:`kernels.moe_gate.weigh_all`."""
    scores = torch.sigmoid(logits.float())
    if normalise:
        scores = scores / (scores.sum(-1, keepdim=True) + 1e-20)
    ones = torch.ones((len(scores), num_leading), device=logits.device)
    return torch.cat((ones, scores * scale), dim=1)
