"""Affine blocks: matrices of 4- or 8-bit integers with a scale and a minimum per group of 32 columns.

``w[n, k] = scale[n, k // 32] * q[n, k] + min[n, k // 32]`` with unsigned ``q``. GGUF's Q4_0, Q4_1 and Q8_0
blocks are of this form exactly, and so is symmetric INT4 (``min = -8 * scale``). In a checkpoint a matrix
``X.weight`` of this form is three tensors::

    X.weight_packed   uint8    [rows, columns * bits / 8]
    X.weight_scale    float16  [rows, columns / 32]
    X.weight_min      float16  [rows, columns / 32]

With 8 bits a byte is a column. With 4 bits byte ``b`` of a group's 16 holds column ``b`` in its low half and
column ``b + 16`` in its high half.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

GROUP_SIZE = 32


@dataclass(frozen=True, slots=True)
class AffineBlocks:
    """One matrix ``[rows, columns]``; see the module for the layout of the three tensors."""

    packed: Tensor
    scale: Tensor
    minimum: Tensor

    @property
    def bits(self) -> int:
        return int(self.packed.shape[1]) * 8 // self.num_columns

    @property
    def num_rows(self) -> int:
        return int(self.packed.shape[0])

    @property
    def num_columns(self) -> int:
        return int(self.scale.shape[1]) * GROUP_SIZE

    @property
    def shape(self) -> tuple[int, int]:
        return self.num_rows, self.num_columns

    def quantised(self) -> Tensor:
        """The integers, uint8 ``[rows, columns]``."""
        if self.bits == 8:
            return self.packed
        groups = self.packed.view(self.num_rows, -1, GROUP_SIZE // 2)
        return torch.cat((groups & 0xF, groups >> 4), dim=2).view(self.num_rows, self.num_columns)

    def dequantise(self) -> Tensor:
        """The matrix in float32."""
        groups = self.quantised().view(self.num_rows, -1, GROUP_SIZE).float()
        scaled = groups * self.scale.float().unsqueeze(2) + self.minimum.float().unsqueeze(2)
        return scaled.view(self.num_rows, self.num_columns)

    def select_rows(self, rows: Tensor) -> AffineBlocks:
        return AffineBlocks(self.packed[rows], self.scale[rows], self.minimum[rows])

    def select_columns(self, start: int, end: int) -> AffineBlocks:
        """Columns ``start .. end - 1``; both must be multiples of the group size."""
        if start % GROUP_SIZE or end % GROUP_SIZE:
            raise ValueError(f"columns {start}..{end} do not lie on groups of {GROUP_SIZE}")
        byte, group = self.bits * GROUP_SIZE // 8, slice(start // GROUP_SIZE, end // GROUP_SIZE)
        packed = self.packed[:, group.start * byte : group.stop * byte]
        return AffineBlocks(
            packed.contiguous(), self.scale[:, group].contiguous(), self.minimum[:, group].contiguous()
        )


Matrix = Tensor | AffineBlocks
"""A weight as a checkpoint has it."""


def concatenate(matrices: Sequence[Matrix], dim: int) -> Matrix:
    """Join matrices along rows (0) or columns (1); affine blocks of equal bits stay affine."""
    if len(matrices) == 1:
        return matrices[0]
    blocks = [matrix for matrix in matrices if isinstance(matrix, AffineBlocks)]
    if len(blocks) == len(matrices) and len({matrix.bits for matrix in blocks}) == 1:
        return AffineBlocks(
            torch.cat([matrix.packed for matrix in blocks], dim),
            torch.cat([matrix.scale for matrix in blocks], dim),
            torch.cat([matrix.minimum for matrix in blocks], dim),
        )
    return torch.cat([to_float(matrix) for matrix in matrices], dim)


def select_rows(matrix: Matrix, rows: Tensor) -> Matrix:
    """Rows of a matrix in the order of ``rows`` (``[n]`` int64)."""
    return matrix.select_rows(rows) if isinstance(matrix, AffineBlocks) else matrix[rows]


def to_float(matrix: Matrix) -> Tensor:
    """The matrix as a plain tensor: affine blocks in float32, others as they are."""
    return matrix.dequantise() if isinstance(matrix, AffineBlocks) else matrix
