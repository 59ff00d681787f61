"""Linear weights packed for the CPU: affine blocks of 4 or 8 bits, or dense, interleaved by vector lanes."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor
from torch.nn.functional import pad

TILE = 32
"""Output rows that lie side by side; a multiple of every vector width in use."""
GROUP = 32
"""Input columns that share a scale and a minimum."""

Bits = Literal[4, 8, 16, 32]


@dataclass(frozen=True, slots=True, eq=False)
class PackedWeight:
    """A matrix ``[out_features, in_features]`` in tiles of 32 rows.

    With ``bits`` 4 or 8, ``w = scale * code + minimum`` with one scale and minimum per row and 32 columns;
    with 16 the values are bfloat16, with 32 float32. ``data`` is int32 and contiguous:

    - 4, 8: ``[tiles, in / 32, header + 32 * bits]``. The header has the 32 rows' scales, then their minima,
      as float16 (32 words) or float32 (64 words, ``has_wide_scales``); then word ``32 * i + row`` holds the
      codes of columns ``i * 32 / bits ...``, lowest bits first.
    - 16: ``[tiles, in / 2, 32]``, the even column in the low half. 32: ``[tiles, in, 32]``.

    Rows that pad the last tile are zero.
    """

    out_features: int
    in_features: int
    bits: Bits
    has_wide_scales: bool
    data: Tensor

    @staticmethod
    def pack(codes: Tensor, scales: Tensor, minima: Tensor, bits: Literal[4, 8]) -> PackedWeight:
        """Pack affine blocks.

        Args:
            codes: ``[out, in]`` uint8, each below ``2 ** bits``. Signed formats add ``2 ** (bits - 1)`` to
                the code and subtract as many scales from the minimum (Q8_0: ``-128 * d``; symmetric INT4:
                ``-8 * s``).
            scales, minima: ``[out, in / 32]``; kept as float16 when that loses nothing, else as float32.

        Raises:
            ValueError: when ``in`` is no multiple of 32 or the shapes do not fit together.
        """
        rows, columns = codes.shape
        if columns % GROUP or scales.shape != (rows, columns // GROUP) or minima.shape != scales.shape:
            raise ValueError(
                f"codes {list(codes.shape)} in groups of {GROUP} do not fit scales {list(scales.shape)}, "
                f"minima {list(minima.shape)}"
            )
        tiles, groups, per_word = -(-rows // TILE), columns // GROUP, 32 // bits
        header = torch.stack((_tiled(scales.float()), _tiled(minima.float())), dim=2)
        narrow = header.half()
        has_wide_scales = not torch.equal(narrow.float(), header)
        words = (
            (header if has_wide_scales else narrow).contiguous().view(torch.int32).reshape(tiles, groups, -1)
        )
        lanes = _tiled(codes, GROUP).view(tiles, groups, GROUP // per_word, per_word, TILE)
        packed = torch.zeros((tiles, groups, GROUP // per_word, TILE), dtype=torch.int32)
        for place in range(per_word):
            packed |= lanes[:, :, :, place].int() << (bits * place)
        data = torch.cat((words, packed.flatten(2)), dim=2)
        return PackedWeight(rows, columns, bits, has_wide_scales, data.contiguous())

    @staticmethod
    def from_dense(weight: Tensor) -> PackedWeight:
        """Pack a dense ``[out, in]`` matrix without loss: bfloat16 as such, other types as float32.

        Raises:
            ValueError: when a bfloat16 matrix has an odd number of columns.
        """
        rows, columns = weight.shape
        if weight.dtype != torch.bfloat16:
            data = _tiled(weight.float()).contiguous().view(torch.int32)
            return PackedWeight(rows, columns, 32, False, data)
        if columns % 2:
            raise ValueError(f"a bfloat16 weight needs an even number of columns, not {columns}")
        lanes = _tiled(weight, 2)
        data = lanes.transpose(2, 3).contiguous().view(torch.int32).squeeze(3)
        return PackedWeight(rows, columns, 16, False, data.contiguous())

    @staticmethod
    def concatenate(weights: Sequence[PackedWeight]) -> PackedWeight:
        """Stack weights that share their input, so that one call computes all of them.

        Raises:
            ValueError: when they differ in width or bits, or one but the last has a number of rows that is no
                multiple of 32.
        """
        first, *rest = weights
        if any((w.in_features, w.bits) != (first.in_features, first.bits) for w in rest):
            raise ValueError("weights to concatenate must have one in_features and one number of bits")
        if any(w.out_features % TILE for w in weights[:-1]):
            raise ValueError(f"all weights but the last need a multiple of {TILE} rows")
        is_wide = any(w.has_wide_scales for w in weights)
        parts = [w.widened() if is_wide else w for w in weights]
        rows = sum(w.out_features for w in weights)
        data = torch.cat([w.data for w in parts])
        return PackedWeight(rows, first.in_features, first.bits, is_wide, data)

    @staticmethod
    def concatenate_columns(weights: Sequence[PackedWeight]) -> PackedWeight:
        """Put weights of equally many rows side by side.

        Raises:
            ValueError: when they differ in rows or bits.
        """
        first, *rest = weights
        if any((w.out_features, w.bits) != (first.out_features, first.bits) for w in rest):
            raise ValueError("weights side by side must have one out_features and one number of bits")
        is_wide = any(w.has_wide_scales for w in weights)
        data = torch.cat([(w.widened() if is_wide else w).data for w in weights], dim=1)
        columns = sum(w.in_features for w in weights)
        return PackedWeight(first.out_features, columns, first.bits, is_wide, data)

    def widened(self) -> PackedWeight:
        """The same weight with float32 scales and minima."""
        if self.has_wide_scales or self.bits > 8:
            return self
        header = self.data[:, :, :TILE].contiguous().view(torch.float16).float().view(torch.int32)
        data = torch.cat((header, self.data[:, :, TILE:]), dim=2)
        return PackedWeight(self.out_features, self.in_features, self.bits, True, data)

    @property
    def num_bytes(self) -> int:
        """Bytes that one pass over the weight reads."""
        return self.data.numel() * 4

    def dequantize(self) -> Tensor:
        """The matrix ``[out_features, in_features]`` in float32, each element rounded once."""
        return _untiled(self._lanes(self.data))[: self.out_features]

    def dequantize_rows(self, rows: Tensor) -> Tensor:
        """Rows ``[n]`` (int64) of the matrix, ``[n, in_features]`` float32."""
        lanes = self._lanes(self.data[rows // TILE])
        return lanes[torch.arange(len(rows)), :, rows % TILE]

    def _lanes(self, data: Tensor) -> Tensor:
        """Dequantised ``[tiles, in_features, 32]`` of some tiles of ``data``."""
        tiles = data.shape[0]
        if self.bits == 32:
            return data.view(torch.float32)
        if self.bits == 16:
            halves = data.unsqueeze(3).view(torch.bfloat16)
            return halves.transpose(2, 3).reshape(tiles, -1, TILE).float()
        header_words = 2 * TILE if self.has_wide_scales else TILE
        header = data[:, :, :header_words].contiguous()
        values = header.view(torch.float32 if self.has_wide_scales else torch.float16).float()
        scales, minima = values.view(tiles, -1, 2, 1, TILE).unbind(2)
        words = data[:, :, header_words:].reshape(tiles, scales.shape[1], -1, 1, TILE)
        shifts = torch.arange(0, 32, self.bits, dtype=torch.int32).view(-1, 1)
        codes = (words >> shifts & (2**self.bits - 1)).flatten(2, 3)
        wide: Tensor = scales.double() * codes + minima.double()
        return wide.float().flatten(1, 2)


def _tiled(matrix: Tensor, columns: int = 1) -> Tensor:
    """``[out, in]`` to ``[tiles, in / columns, (columns,) 32]``, the last tile padded with zeros."""
    rows, width = matrix.shape
    padded: Tensor = pad(matrix, (0, 0, 0, -rows % TILE))
    tiled = padded.view(-1, TILE, width // columns, columns).permute(0, 2, 3, 1)
    return tiled.squeeze(2) if columns == 1 else tiled.contiguous()


def _untiled(lanes: Tensor) -> Tensor:
    """``[tiles, in, 32]`` to ``[tiles * 32, in]``."""
    return lanes.transpose(1, 2).flatten(0, 1)
