"""Trials of the permutation and the way back."""

from __future__ import annotations

from functools import partial

import torch
from torch import Tensor

from kernels.launching import Launcher
from kernels.moe_permute import kernel, reference
from kernels.trial import Prepared, Setting, Trial


def prepare_permute(setting: Setting, *, tokens: int, experts: int, top_k: int, hidden: int) -> Prepared:
    """Expert 1 is chosen by nobody."""
    x = setting.normal(tokens, hidden)
    chosen = setting.integers(0, experts, tokens, top_k)
    if setting.device != "meta":
        chosen[chosen == 1] = 0

    def run(launch: Launcher) -> tuple[Tensor, ...]:
        order, places, starts = kernel.sort_pairs(chosen, experts, launch=launch)
        return kernel.gather(x, order, top_k, launch=launch), order, places, starts

    def expect() -> tuple[Tensor, ...]:
        order, places, starts = reference.sort_pairs(chosen, experts)
        return x[order.long() // top_k], order, places, starts

    return Prepared(run, expect, (1 + top_k) * x.nbytes + 6 * chosen.nbytes)


def prepare_unpermute(setting: Setting, *, tokens: int, top_k: int, hidden: int) -> Prepared:
    """Rows in shuffled order back to their tokens."""
    y = setting.normal(tokens * top_k, hidden)
    places = setting.shuffled(tokens * top_k)
    weights = setting.uniform(tokens, top_k)
    return Prepared(
        lambda launch: (kernel.moe_unpermute(y, places, weights, launch=launch),),
        lambda: (reference.moe_unpermute(y, places, weights),),
        y.nbytes + y.nbytes // top_k + 2 * weights.nbytes,
        2 * y.numel(),
    )


SMALL = (
    Trial("moe_permute", "permute", partial(prepare_permute, tokens=9, experts=5, top_k=2, hidden=40),
          (torch.float16,)),
    Trial("moe_permute", "unpermute", partial(prepare_unpermute, tokens=4, top_k=3, hidden=70)),
)  # fmt: skip
REAL = (
    Trial("moe_permute", "permute, decode 64 x 8 of 384", partial(
        prepare_permute, tokens=64, experts=384, top_k=8, hidden=7168)),
    Trial("moe_permute", "permute, prefill 8192 x 8 of 384", partial(
        prepare_permute, tokens=8192, experts=384, top_k=8, hidden=7168)),
    Trial("moe_permute", "unpermute, prefill 8192 x 8", partial(
        prepare_unpermute, tokens=8192, top_k=8, hidden=7168)),
)  # fmt: skip
