"""Rows in the order of their experts, and the weighted way back."""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor

from kernels.dispatch import takes_triton
from kernels.moe_permute import reference


@dataclass(frozen=True, slots=True)
class Permutation:
    """Pairs of token and chosen expert, sorted by expert; within one expert in order of tokens.

    Attributes:
        order: ``[pairs]`` int32: the pair (``token * top_k + choice``) at each sorted row.
        places: ``[pairs]`` int32: the sorted row of each pair.
        starts: ``[experts + 1]`` int32: the sorted rows of expert ``e`` are ``starts[e] .. starts[e+1]-1``.
    """

    order: Tensor
    places: Tensor
    starts: Tensor


def moe_permute(x: Tensor, experts: Tensor, num_experts: int) -> tuple[Tensor, Permutation]:
    """Copy every token's row once for each expert chosen for it, sorted by expert.

    Args:
        x: ``[tokens, hidden]``; rows may be strided.
        experts: ``[tokens, top_k]`` int32, each below ``num_experts``.

    Returns:
        ``[tokens * top_k, hidden]`` and how they were sorted.

    Raises:
        ValueError: when ``experts`` has not one row for each of ``x``.
    """
    tokens, top_k = experts.shape
    if x.shape[0] != tokens:
        raise ValueError(f"experts must have {x.shape[0]} rows, not {tokens}")
    if takes_triton("moe_permute", x):
        from kernels.moe_permute import kernel

        permutation = Permutation(*kernel.sort_pairs(experts, num_experts))
        return kernel.gather(x, permutation.order, top_k), permutation
    permutation = Permutation(*reference.sort_pairs(experts, num_experts))
    return x[permutation.order.long() // top_k], permutation


def moe_unpermute(y: Tensor, places: Tensor, weights: Tensor) -> Tensor:
    """``sum_k weights[t, k] * y[places[t * top_k + k]]`` for each token, summed in float32.

    Args:
        y: ``[pairs, hidden]``, contiguous.
        places: ``[pairs]`` int32, of :class:`Permutation`.
        weights: ``[tokens, top_k]`` float32.

    Returns:
        ``[tokens, hidden]`` of ``y``'s dtype.

    Raises:
        ValueError: when the pairs do not fit together.
    """
    if not y.shape[0] == places.shape[0] == weights.numel():
        raise ValueError(f"{y.shape[0]} rows, {places.shape[0]} places and {weights.numel()} weights differ")
    if takes_triton("moe_permute", y):
        from kernels.moe_permute import kernel

        return kernel.moe_unpermute(y, places, weights)
    return reference.moe_unpermute(y, places, weights)
