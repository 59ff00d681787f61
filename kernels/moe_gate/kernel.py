"""Triton form of the router: one program a token, all its experts in one warp's registers."""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from kernels.launching import Launcher, launch_now
from kernels.tiles import power_of_two


@triton.jit
def choose_experts(
    logits, bias, weights, chosen, scale,
    EXPERTS: tl.constexpr, TOP_K: tl.constexpr, GROUPS: tl.constexpr, TOP_GROUPS: tl.constexpr,
    BLOCK_GROUPS: tl.constexpr, BLOCK_MEMBERS: tl.constexpr, BLOCK_K: tl.constexpr,
    HAS_BIAS: tl.constexpr, NORMALISE: tl.constexpr,
):  # fmt: skip
    members: tl.constexpr = EXPERTS // GROUPS
    token = tl.program_id(0).to(tl.int64)
    group = tl.arange(0, BLOCK_GROUPS)
    member = tl.arange(0, BLOCK_MEMBERS)
    free = (group < GROUPS)[:, None] & (member < members)[None, :]
    expert = tl.where(free, group[:, None] * members + member[None, :], EXPERTS)
    logit = tl.load(logits + token * EXPERTS + expert, mask=free, other=0.0).to(tl.float32)
    score = 1.0 / (1.0 + tl.exp(-logit))
    choice = score
    if HAS_BIAS:
        choice = score + tl.load(bias + expert, mask=free, other=0.0)
    choice = tl.where(choice == choice, choice, float("-inf"))
    if TOP_GROUPS < GROUPS:
        masked = tl.where(free, choice, float("-inf"))
        best = tl.max(masked, 1)
        if members > 1:
            at = tl.min(tl.where(masked == best[:, None], expert, EXPERTS), 1)
            best += tl.max(tl.where(expert == at[:, None], float("-inf"), masked), 1)
        left = group < GROUPS
        for _ in range(TOP_GROUPS):
            highest = tl.max(tl.where(left, best, float("-inf")), 0)
            at = tl.min(tl.where(left & (best == highest), group, BLOCK_GROUPS), 0)
            left = left & (group != at)
        free = free & ((group < GROUPS) & (left == 0))[:, None]
    slot = tl.arange(0, BLOCK_K)
    picked = tl.zeros((BLOCK_K,), dtype=tl.int32)
    weight = tl.zeros((BLOCK_K,), dtype=tl.float32)
    for place in range(TOP_K):
        highest = tl.max(tl.max(tl.where(free, choice, float("-inf")), 1), 0)
        # Among equals the lowest index; always one that is free, whatever the numbers are.
        at = tl.min(tl.min(tl.where(free & (choice == highest), expert, EXPERTS), 1), 0)
        picked = tl.where(slot == place, at, picked)
        value = tl.sum(tl.sum(tl.where(expert == at, score, 0.0), 1), 0)
        weight = tl.where(slot == place, value, weight)
        free = free & (expert != at)
    if NORMALISE:
        weight = weight / (tl.sum(weight, 0) + 1e-20)
    tl.store(weights + token * TOP_K + slot, weight * scale, mask=slot < TOP_K)
    tl.store(chosen + token * TOP_K + slot, picked, mask=slot < TOP_K)


def moe_gate(
    logits: Tensor, bias: Tensor | None, top_k: int, num_groups: int, top_groups: int, normalise: bool,
    scale: float, *, launch: Launcher = launch_now,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    """See :func:`kernels.moe_gate.moe_gate`."""
    tokens, experts = logits.shape
    weights = torch.empty((tokens, top_k), dtype=torch.float32, device=logits.device)
    chosen = torch.empty((tokens, top_k), dtype=torch.int32, device=logits.device)
    launch(
        choose_experts, (tokens,), num_warps=1,
        logits=logits.contiguous(), bias=logits if bias is None else bias, weights=weights, chosen=chosen,
        scale=scale, EXPERTS=experts, TOP_K=top_k, GROUPS=num_groups, TOP_GROUPS=top_groups,
        BLOCK_GROUPS=power_of_two(num_groups), BLOCK_MEMBERS=power_of_two(experts // num_groups),
        BLOCK_K=power_of_two(top_k), HAS_BIAS=bias is not None, NORMALISE=normalise,
    )  # fmt: skip
    return weights, chosen
