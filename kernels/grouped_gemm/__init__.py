"""One matrix product for each expert, over rows sorted by expert."""

from __future__ import annotations

from torch import Tensor

from kernels.dispatch import takes_triton
from kernels.grouped_gemm import reference


def grouped_gemm(x: Tensor, weight: Tensor, starts: Tensor) -> Tensor:
    """``x[r] @ weight[e].T`` for every row ``r`` of expert ``e``, summed in float32.

    Args:
        x: ``[rows, depth]``, sorted by expert; rows may be strided.
        weight: ``[experts, columns, depth]``, contiguous, of ``x``'s dtype.
        starts: ``[experts + 1]`` int32: expert ``e`` has the rows ``starts[e] .. starts[e+1]-1``.

    Returns:
        ``[rows, columns]`` of ``x``'s dtype.

    Raises:
        ValueError: when the shapes do not fit together.
    """
    if weight.shape[2] != x.shape[1] or starts.shape != (weight.shape[0] + 1,):
        raise ValueError(
            f"weight {list(weight.shape)} and starts {list(starts.shape)} do not fit x {list(x.shape)}"
        )
    if takes_triton("grouped_gemm", x):
        from kernels.grouped_gemm import kernel

        return kernel.grouped_gemm(x, weight, starts)
    return reference.grouped_gemm(x, weight, starts)
