"""Plain torch form of sampling: a sort."""

from __future__ import annotations

import torch
from torch import Tensor


def sample(
    logits: Tensor, temperatures: Tensor, draws: Tensor, bitmask: Tensor | None, top_ks: Tensor,
    top_ps: Tensor, min_ps: Tensor, greedy_below: float,
) -> Tensor:  # fmt: skip
    """See :func:`kernels.sample.sample`."""
    scores = logits.float()
    if bitmask is not None:
        shifts = torch.arange(32, dtype=torch.int32, device=logits.device)
        allowed = ((bitmask[..., None] >> shifts) & 1).flatten(1)[:, : scores.shape[1]] == 1
        scores = scores.masked_fill(~allowed, -torch.inf)
    tokens = []
    for row in range(scores.shape[0]):
        temperature, draw, top_k, top_p, min_p = (
            float(values[row]) for values in (temperatures, draws, top_ks, top_ps, min_ps)
        )
        tokens.append(_sample_row(scores[row], temperature, draw, top_k, top_p, min_p, greedy_below))
    return torch.tensor(tokens, dtype=torch.int32, device=logits.device)


def _sample_row(
    scores: Tensor, temperature: float, draw: float, top_k: float, top_p: float, min_p: float,
    greedy_below: float,
) -> int:  # fmt: skip
    highest, best = scores.max(), int(scores.argmax())
    if not bool(highest.isfinite()):
        return -1
    if temperature < greedy_below:
        return best
    shares = torch.exp((scores - highest) / temperature).double()
    kept = shares >= max(min_p, 1e-38)
    if 0 < top_k < int(kept.sum()):
        kept &= shares >= shares.sort(descending=True).values[int(top_k) - 1]
    if top_p < 1:
        falling = torch.where(kept, shares, 0.0).sort(descending=True).values
        reached = falling.cumsum(0)
        kept &= shares >= falling[int((reached < top_p * reached[-1]).sum())]
    sums = torch.where(kept, shares, 0.0).cumsum(0)
    beyond = torch.nonzero(sums > draw * sums[-1])
    return int(beyond[0]) if len(beyond) else best
