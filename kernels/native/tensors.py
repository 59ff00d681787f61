"""From tensors to the addresses that native code reads: the checks that keep a wrong tensor out of C."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor


def require_rows(name: str, x: Tensor) -> tuple[int, int]:
    """The shape of a contiguous float32 matrix on the CPU.

    Raises:
        ValueError: naming ``name``, when ``x`` is anything else.
    """
    if x.dim() != 2 or x.dtype is not torch.float32 or not x.is_contiguous() or not x.is_cpu:
        raise ValueError(f"{name} must be a contiguous float32 matrix on the CPU, not {_describe(x)}")
    rows, columns = x.shape
    return rows, columns


def address(
    name: str,
    x: Tensor | None,
    shape: Sequence[int],
    *,
    dtype: torch.dtype = torch.float32,
    strided_rows: bool = False,
) -> int:
    """The address of ``x``'s data, 0 for None.

    With ``strided_rows`` the first dimension may have any stride; what follows it must be contiguous.

    Raises:
        ValueError: naming ``name``, when ``x`` has another shape or dtype, is not contiguous or not on the
            CPU.
    """
    if x is None:
        return 0
    if x.dtype is not dtype or x.shape != shape or not x.is_cpu:
        raise ValueError(f"{name} must be {list(shape)} of {dtype} on the CPU, not {_describe(x)}")
    if not x.is_contiguous() and not (strided_rows and x.shape[0] and x[0].is_contiguous()):
        raise ValueError(f"{name} must be contiguous, not {_describe(x)}")
    return x.data_ptr()


def _describe(x: Tensor) -> str:
    return f"{list(x.shape)} of {x.dtype} on {x.device}, strides {list(x.stride())}"
