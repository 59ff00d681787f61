"""Trials of the router."""

from __future__ import annotations

from functools import partial

import torch

from kernels.moe_gate import kernel, reference
from kernels.moe_gate.cases import CASES, GateCase
from kernels.trial import Prepared, Setting, Trial


def prepare(setting: Setting, *, case: GateCase, tokens: int, has_bias: bool = True) -> Prepared:
    """Logits and a bias of the same size; the first row has nothing but ties."""
    logits = setting.normal(tokens, case.experts, dtype=torch.float32)
    if setting.device == "cpu":
        logits[0] = 0.25
    bias = setting.normal(case.experts, dtype=torch.float32) if has_bias else None
    arguments = (logits, bias, case.top_k, case.num_groups, case.top_groups, case.normalise, case.scale)
    return Prepared(
        lambda launch: kernel.moe_gate(*arguments, launch=launch),
        lambda: reference.moe_gate(*arguments),
        logits.nbytes + 8 * tokens * case.top_k,
        4 * tokens * case.experts,
        {"torch": lambda: reference.moe_gate(*arguments)},
    )


_FLOAT = (torch.float32,)
SMALL = (
    *(Trial("moe_gate", case.name, partial(prepare, case=case, tokens=3), _FLOAT) for case in CASES),
    Trial("moe_gate", "no bias", partial(prepare, case=CASES[3], tokens=2, has_bias=False), _FLOAT),
)
REAL = (
    Trial("moe_gate", "decode 64 x 384", partial(prepare, case=CASES[2], tokens=64)),
    Trial("moe_gate", "prefill 8192 x 384", partial(prepare, case=CASES[2], tokens=8192)),
)
