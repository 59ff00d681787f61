"""Products with packed weights: a linear layer, one matrix per group of heads, and the embedding of tokens.

``y[n] = sum_k (scale * code + minimum)[n, k] * x[k]`` with float32 activations and accumulation, ``k``
ascending. The order of the sum depends on nothing else, so a row of ``y`` has the same bits for every
number of rows.
"""

from __future__ import annotations

import torch
from torch import Tensor

from kernels.native import NativeLibrary, address, require_rows
from kernels.packed_linear import reference
from kernels.packed_linear.weight import TILE, PackedWeight

__all__ = ["PackedWeight", "packed_embedding", "packed_head_linear", "packed_linear"]


def packed_linear(
    x: Tensor,
    weight: PackedWeight,
    *,
    out: Tensor | None = None,
    accumulate: bool = False,
    native: NativeLibrary | None = None,
) -> Tensor:
    """``y = x W^T``, or ``out += x W^T``.

    Args:
        x: ``[rows, in_features]`` float32.
        weight: the packed ``W``.
        out: ``[rows, out_features]`` float32, contiguous, to write into; a new tensor when None.
        accumulate: add to ``out`` (a residual, say) instead of overwriting it; the native form starts each
            sum from ``out``.

    Returns:
        ``out`` or the new tensor.

    Raises:
        ValueError: when the shapes do not fit, ``accumulate`` comes without ``out``, or the native form is
            given other tensors than contiguous float32 ones on the CPU.
    """
    if x.shape[-1] != weight.in_features:
        raise ValueError(f"x has {x.shape[-1]} columns, the weight {weight.in_features}")
    if accumulate and out is None:
        raise ValueError("accumulate needs out")
    if native is None:
        return reference.packed_linear(x, weight, out, accumulate)
    rows, columns = require_rows("x", x)
    if out is None:
        out = torch.empty((rows, weight.out_features))
        out_at = out.data_ptr()
    else:
        out_at = address("out", out, (rows, weight.out_features))
    native.packed_linear(
        x.data_ptr(), weight.data.data_ptr(), out_at, rows, columns, weight.out_features, weight.bits,
        weight.has_wide_scales, accumulate,
    )  # fmt: skip
    return out


def packed_head_linear(
    x: Tensor, weight: PackedWeight, groups: int, *, native: NativeLibrary | None = None
) -> Tensor:
    """Multiply each head by the matrix of its group: ``y[t, h] = W[h * groups // heads] x[t, h]``.

    Args:
        x: ``[tokens, heads, in_features]`` float32, contiguous.
        weight: ``[groups * n, in_features]``, the groups' matrices stacked.
        groups: divides ``heads``.

    Returns:
        ``[tokens, heads, n]``.

    Raises:
        ValueError: when the shapes do not fit, or, in the native form, ``n`` is no multiple of 32.
    """
    tokens, heads, columns = x.shape
    if columns != weight.in_features or heads % groups or weight.out_features % groups:
        raise ValueError(
            f"{groups} groups of a weight of {weight.out_features} rows do not fit {list(x.shape)}"
        )
    if native is None:
        return reference.packed_head_linear(x, weight, groups)
    width = weight.out_features // groups
    if width % TILE:
        raise ValueError(f"each group needs a multiple of {TILE} rows, not {width}")
    out = torch.empty((tokens, heads, width))
    native.packed_head_linear(
        address("x", x, x.shape), weight.data.data_ptr(), out.data_ptr(), tokens, heads, columns, width,
        groups, weight.bits, weight.has_wide_scales,
    )  # fmt: skip
    return out


def packed_embedding(
    token_ids: Tensor, weight: PackedWeight, *, native: NativeLibrary | None = None
) -> Tensor:
    """Dequantise one row of ``weight`` per token.

    Args:
        token_ids: ``[tokens]`` int64, each below ``out_features``.

    Returns:
        ``[tokens, in_features]`` float32.

    Raises:
        ValueError: when the native form is given other ids than contiguous int64 ones on the CPU. Ids are not
            checked one by one.
    """
    if native is None:
        return reference.packed_embedding(token_ids, weight)
    (tokens,) = token_ids.shape
    out = torch.empty((tokens, weight.in_features))
    native.packed_embedding(
        address("token_ids", token_ids, (tokens,), dtype=torch.int64), weight.data.data_ptr(), out.data_ptr(),
        tokens, weight.in_features, weight.bits, weight.has_wide_scales,
    )  # fmt: skip
    return out
