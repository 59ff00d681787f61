"""The routed experts of a Mixture of Experts, from packed weights."""

from __future__ import annotations

import torch
from torch import Tensor

from kernels.expert_mlp import reference
from kernels.native import NativeLibrary, address, require_rows
from kernels.packed_linear.weight import TILE, PackedWeight


def expert_mlp(
    x: Tensor,
    weights: Tensor,
    experts: Tensor,
    gate_up: PackedWeight,
    down: PackedWeight,
    num_experts: int,
    *,
    out: Tensor | None = None,
    accumulate: bool = False,
    native: NativeLibrary | None = None,
) -> Tensor:
    """``y = sum_e weight_e * down_e(silu(gate_e x) * up_e x)`` over the experts chosen for each token.

    Experts are summed in ascending order whatever the order in ``experts``. When every expert is chosen
    (``top_k == num_experts``) the native form multiplies the stacked weights at once; the bits are the same.

    Args:
        x: ``[tokens, hidden]`` float32.
        weights: ``[tokens, top_k]`` float32.
        experts: ``[tokens, top_k]`` int32, distinct within a token.
        gate_up: ``[2 * num_experts * width, hidden]``: the gates of all experts, then their ups.
        down: ``[hidden, num_experts * width]``: the experts' columns side by side.
        out: ``[tokens, hidden]`` to write into; a new tensor when None.
        accumulate: add to ``out``.

    Returns:
        ``out`` or the new tensor.

    Raises:
        ValueError: when the shapes do not fit, ``accumulate`` comes without ``out``, or the native form is
            given other tensors than contiguous ones on the CPU or a ``width`` that is no multiple of 32.
    """
    if gate_up.out_features != 2 * down.in_features or gate_up.in_features != x.shape[-1]:
        raise ValueError(
            f"gate_up {[gate_up.out_features, gate_up.in_features]} and "
            f"down {[down.out_features, down.in_features]} do not fit x of {x.shape[-1]} columns"
        )
    if accumulate and out is None:
        raise ValueError("accumulate needs out")
    if native is None:
        return reference.expert_mlp(x, weights, experts, gate_up, down, num_experts, out, accumulate)
    rows, hidden = require_rows("x", x)
    width, top_k = down.in_features // num_experts, experts.shape[1]
    if width % TILE or (gate_up.bits, gate_up.has_wide_scales) != (down.bits, down.has_wide_scales):
        raise ValueError(f"experts must be a multiple of {TILE} wide, not {width}, and packed alike")
    if out is None:
        out = torch.empty((rows, hidden))
    scratch = torch.empty((rows, top_k, 3 * width))
    native.expert_mlp(
        x.data_ptr(), address("weights", weights, (rows, top_k)),
        address("experts", experts, (rows, top_k), dtype=torch.int32),
        gate_up.data.data_ptr(), down.data.data_ptr(), address("out", out, (rows, hidden)),
        scratch.data_ptr(), rows, hidden, width, num_experts, top_k, down.bits, down.has_wide_scales,
        accumulate,
    )  # fmt: skip
    return out
