"""The quantised forms that published checkpoints store matrices in.

INT4 (compressed-tensors, ``pack-quantized``), of a matrix ``X.weight`` ``[rows, columns]``::

    X.weight_packed   int32     [rows, columns / 8]   column 8 w + i in bits 4 i .. 4 i + 3 of word w
    X.weight_scale    bfloat16  [rows, columns / 32]
    X.weight_shape    int32     [2]                   rows, columns

A nibble holds ``q + 8`` (offset binary, not two's complement), and ``W = q * scale``.

fp8::

    X.weight            float8_e4m3fn  [rows, columns]
    X.weight_scale_inv  float32        [rows / 128, columns / 128], rounded up: a factor, in spite of its name
"""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn.functional import pad

from backend.model.quant import GROUP_SIZE, AffineBlocks
from backend.model.quant_config import FP8_BLOCK

_INT4_ZERO = 8
_FP8_MAX = 448.0


def blocks_of_int4(words: Tensor, scale: Tensor) -> AffineBlocks:
    """The same numbers as affine blocks, whose minimum is minus eight scales."""
    rows = words.shape[0]
    # Little-endian words: byte b of a group holds columns 2 b and 2 b + 1, the even one in its low half.
    pairs = words.contiguous().view(torch.uint8).view(rows, -1, GROUP_SIZE // 2)
    codes = torch.stack((pairs & 0xF, pairs >> 4), dim=3).view(rows, -1, GROUP_SIZE)
    packed = codes[:, :, : GROUP_SIZE // 2] | codes[:, :, GROUP_SIZE // 2 :] << 4
    return AffineBlocks(packed.view(rows, -1), scale, scale * -float(_INT4_ZERO))


def store_int4(matrix: Tensor) -> tuple[Tensor, Tensor]:
    """Quantise a matrix to the nearest INT4 numbers; its words and scales as a checkpoint stores them."""
    rows, columns = matrix.shape
    groups = matrix.float().view(rows, -1, GROUP_SIZE)
    scale = (groups.abs().amax(dim=2) / 7.5).clamp_min(2.0**-24).bfloat16()
    steps = (groups / scale.float().unsqueeze(2)).round().clamp(-_INT4_ZERO, _INT4_ZERO - 1)
    codes = (steps + _INT4_ZERO).to(torch.uint8).view(rows, columns)
    pairs = codes[:, 0::2] | codes[:, 1::2] << 4
    return pairs.contiguous().view(torch.int32), scale


def dequantise_fp8(weight: Tensor, scale_inv: Tensor, dtype: torch.dtype) -> Tensor:
    """The matrix in ``dtype``, each number rounded once."""
    rows, columns = weight.shape
    wide = scale_inv.float().repeat_interleave(FP8_BLOCK, 0)[:rows]
    product = weight.float()
    for start in range(0, columns, FP8_BLOCK):
        product[:, start : start + FP8_BLOCK] *= wide[:, start // FP8_BLOCK, None]
    return product.to(dtype)


def store_fp8(matrix: Tensor) -> tuple[Tensor, Tensor]:
    """Quantise a matrix to fp8; its numbers and scales as a checkpoint stores them."""
    rows, columns = matrix.shape
    padded: Tensor = pad(matrix.float(), (0, -columns % FP8_BLOCK, 0, -rows % FP8_BLOCK))
    blocks = padded.view(padded.shape[0] // FP8_BLOCK, FP8_BLOCK, -1, FP8_BLOCK)
    scale_inv = blocks.abs().amax(dim=(1, 3)).clamp_min(2.0**-24) / _FP8_MAX
    steps = (blocks / scale_inv[:, None, :, None]).clamp(-_FP8_MAX, _FP8_MAX)
    weight = steps.view(padded.shape)[:rows, :columns].contiguous().to(torch.float8_e4m3fn)
    return weight, scale_inv
