"""Plain torch form of the routed experts: one expert after another."""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn.functional import linear, silu

from kernels.packed_linear.weight import PackedWeight


def expert_mlp(
    x: Tensor,
    weights: Tensor,
    experts: Tensor,
    gate_up: PackedWeight,
    down: PackedWeight,
    num_experts: int,
    out: Tensor | None,
    accumulate: bool,
) -> Tensor:
    """See :func:`kernels.expert_mlp.expert_mlp`."""
    gates, ups = gate_up.dequantize().view(2, num_experts, -1, x.shape[1])
    downs = down.dequantize().view(down.out_features, num_experts, -1)
    if out is None:
        out = torch.zeros((x.shape[0], down.out_features), dtype=x.dtype, device=x.device)
    elif not accumulate:
        out.zero_()
    for expert in range(num_experts):
        tokens, places = torch.nonzero(experts == expert, as_tuple=True)
        if len(tokens) == 0:
            continue
        rows = x[tokens]
        hidden = silu(linear(rows, gates[expert])) * linear(rows, ups[expert])
        y = linear(hidden * weights[tokens, places, None], downs[:, expert])
        out.index_add_(0, tokens, y)
    return out
