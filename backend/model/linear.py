"""Linear layers over whatever form their weight has: packed for the CPU, or a dense tensor."""

from __future__ import annotations

from typing import Protocol

import torch
from torch import Tensor
from torch.nn import functional

from backend.model.placement import Placement
from backend.model.quant import AffineBlocks, Matrix, to_float
from kernels.native import NativeLibrary
from kernels.packed_linear import PackedWeight, packed_embedding, packed_head_linear, packed_linear


class Linear(Protocol):
    """``y = x W^T``."""

    out_features: int

    def __call__(self, x: Tensor) -> Tensor:
        """``[rows, in] -> [rows, out]``."""
        ...


class DenseLinear:
    """A plain matrix product."""

    def __init__(self, weight: Tensor) -> None:
        self._weight = weight
        self.out_features = int(weight.shape[0])

    def __call__(self, x: Tensor) -> Tensor:
        return functional.linear(x, self._weight)


class PackedLinear:
    """A product with a packed weight by the native kernel."""

    def __init__(self, weight: PackedWeight, native: NativeLibrary) -> None:
        self._weight = weight
        self._native = native
        self.out_features = weight.out_features

    def __call__(self, x: Tensor) -> Tensor:
        return packed_linear(x, self._weight, native=self._native)


class HeadLinear:
    """One matrix per head, heads of a group sharing theirs: ``y[t, h] = W[h * groups // heads] x[t, h]``."""

    def __init__(self, matrix: Matrix, num_groups: int, placement: Placement) -> None:
        self._num_groups = num_groups
        self._native = placement.native
        rows = matrix.shape[0] // num_groups
        self._packed: PackedWeight | None = None
        if placement.native is not None:
            self._packed = pack(matrix)
        else:
            self._stacked = place(matrix, placement).view(num_groups, rows, -1).transpose(1, 2).contiguous()

    def __call__(self, x: Tensor) -> Tensor:
        """``[tokens, heads, in] -> [tokens, heads, out]``."""
        if self._packed is not None:
            return packed_head_linear(x, self._packed, self._num_groups, native=self._native)
        tokens, heads, width = x.shape
        per_group = heads // self._num_groups
        grouped = x.view(tokens, self._num_groups, per_group, width).transpose(0, 1)
        out = torch.bmm(grouped.reshape(self._num_groups, -1, width), self._stacked)
        return out.view(self._num_groups, tokens, per_group, -1).transpose(0, 1).reshape(tokens, heads, -1)


class Embedding:
    """Rows of a matrix by token id."""

    def __init__(self, matrix: Matrix | PackedWeight, placement: Placement) -> None:
        self._native = placement.native
        self._packed: PackedWeight | None = None
        if isinstance(matrix, PackedWeight):
            self._packed = matrix
        else:
            self._table = place(matrix, placement)

    def __call__(self, token_ids: Tensor) -> Tensor:
        """``[tokens]`` int64 -> ``[tokens, hidden]``."""
        if self._packed is not None:
            return packed_embedding(token_ids, self._packed, native=self._native)
        return self._table[token_ids]


def build_linear(matrix: Matrix, placement: Placement) -> Linear:
    """The layer of one matrix, in the form that ``placement`` asks for."""
    if placement.native is not None:
        return PackedLinear(pack(matrix), placement.native)
    return DenseLinear(place(matrix, placement))


def build_embedding_and_head(
    embedding: Matrix, head: Matrix | None, placement: Placement
) -> tuple[Embedding, Linear]:
    """The two ends of a model; ``head`` None ties them, and they share memory then."""
    if placement.native is not None:
        packed = pack(embedding)
        tied = packed if head is None else pack(head)
        return Embedding(packed, placement), PackedLinear(tied, placement.native)
    table = place(embedding, placement)
    return Embedding(table, placement), DenseLinear(table if head is None else place(head, placement))


def pack(matrix: Matrix) -> PackedWeight:
    """The native kernels' form of a matrix, without loss."""
    if not isinstance(matrix, AffineBlocks):
        return PackedWeight.from_dense(matrix)
    return PackedWeight.pack(matrix.quantised(), matrix.scale, matrix.minimum, 4 if matrix.bits == 4 else 8)


def alike(first: PackedWeight, second: PackedWeight) -> tuple[PackedWeight, PackedWeight]:
    """Two packed weights with scales of one width, as a kernel that reads both wants them."""
    if first.has_wide_scales == second.has_wide_scales:
        return first, second
    return first.widened(), second.widened()


def place(matrix: Matrix, placement: Placement) -> Tensor:
    """The dense form of a matrix."""
    return to_float(matrix).to(device=placement.device, dtype=placement.dtype).contiguous()
