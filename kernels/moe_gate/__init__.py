"""The router: which experts a token goes to, and with what weights."""

from __future__ import annotations

import torch
from torch import Tensor

from kernels.dispatch import takes_triton
from kernels.moe_gate import reference
from kernels.native import NativeLibrary, address, require_rows


def moe_gate(
    logits: Tensor,
    bias: Tensor | None,
    top_k: int,
    *,
    num_groups: int = 1,
    top_groups: int = 1,
    normalise: bool = True,
    scale: float = 1.0,
    native: NativeLibrary | None = None,
) -> tuple[Tensor, Tensor]:
    """DeepSeek-V3's ``noaux_tc`` choice of experts, in float32.

    ``s = sigmoid(logits)``. The choice goes by ``s + bias``: with groups, a group counts the sum of its two
    best, and only experts of the ``top_groups`` best groups may be chosen. Ties go to the lower index. The
    weights are the chosen ``s`` (without bias), divided by ``their sum + 1e-20`` when ``normalise``, times
    ``scale``.

    Args:
        logits: ``[tokens, experts]`` float32.
        bias: ``[experts]`` float32, ``e_score_correction_bias``; None for zeros.
        top_k: experts per token.

    Returns:
        weights ``[tokens, top_k]`` float32 and experts ``[tokens, top_k]`` int32, best first.

    Raises:
        ValueError: when ``top_k`` or the groups do not fit the number of experts.
    """
    tokens, experts = require_rows("logits", logits) if native is not None else tuple(logits.shape)
    if experts % num_groups or not 1 <= top_groups <= num_groups:
        raise ValueError(f"{experts} experts cannot be chosen from {top_groups} of {num_groups} groups")
    if not 1 <= top_k <= experts // num_groups * top_groups:
        raise ValueError(f"top_k {top_k} must lie in 1..{experts // num_groups * top_groups}")
    if takes_triton("moe_gate", logits):
        from kernels.moe_gate import kernel

        return kernel.moe_gate(logits, bias, top_k, num_groups, top_groups, normalise, scale)
    if native is None:
        return reference.moe_gate(logits, bias, top_k, num_groups, top_groups, normalise, scale)
    weights = torch.empty((tokens, top_k))
    chosen = torch.empty((tokens, top_k), dtype=torch.int32)
    native.moe_gate(
        logits.data_ptr(), address("bias", bias, (experts,)), weights.data_ptr(), chosen.data_ptr(),
        tokens, experts, top_k, num_groups, top_groups, normalise, scale,
    )  # fmt: skip
    return weights, chosen


def weigh_all(
    logits: Tensor,
    *,
    num_leading: int = 0,
    normalise: bool = True,
    scale: float = 1.0,
    native: NativeLibrary | None = None,
) -> Tensor:
    """The weights of a router that chooses every expert: as :func:`moe_gate`, but in the experts' own order.

    Args:
        logits: ``[tokens, experts]`` float32.
        num_leading: so many ones are put before each row, the weights of shared experts.

    Returns:
        ``[tokens, num_leading + experts]`` float32.

    Raises:
        ValueError: when the native form is given something else than a contiguous float32 CPU tensor.
    """
    if native is None:
        return reference.weigh_all(logits, num_leading, normalise, scale)
    tokens, experts = require_rows("logits", logits)
    weights = torch.empty((tokens, num_leading + experts))
    native.moe_weigh_all(
        logits.data_ptr(), weights.data_ptr(), tokens, experts, num_leading, normalise, scale
    )
    return weights
