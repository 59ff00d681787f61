"""Affine blocks hold what their GGUF types hold, and stay exact when they are cut and joined."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from gguf import GGMLQuantizationType
from gguf.quants import dequantize, quantize

from backend.model.gguf_file import affine_blocks, half_split_order
from backend.model.linear import pack
from backend.model.quant import AffineBlocks, concatenate, select_rows, to_float

KINDS = [GGMLQuantizationType.Q4_0, GGMLQuantizationType.Q4_1, GGMLQuantizationType.Q8_0]


def make(
    kind: GGMLQuantizationType, rows: int = 40, columns: int = 96, seed: int = 0
) -> tuple[AffineBlocks, np.ndarray]:
    data = quantize(np.random.default_rng(seed).normal(size=(rows, columns)).astype(np.float32), kind)
    return affine_blocks(kind, torch.from_numpy(data)), dequantize(data, kind)


@pytest.mark.parametrize("kind", KINDS)
def test_blocks_dequantise_as_gguf_does(kind: GGMLQuantizationType) -> None:
    blocks, expected = make(kind)
    assert blocks.bits == (8 if kind == GGMLQuantizationType.Q8_0 else 4)
    assert blocks.shape == (40, 96)
    torch.testing.assert_close(blocks.dequantise(), torch.from_numpy(expected), rtol=1e-6, atol=1e-6)


@pytest.mark.parametrize("kind", KINDS)
def test_the_native_form_holds_the_same_numbers(kind: GGMLQuantizationType) -> None:
    blocks, expected = make(kind)
    torch.testing.assert_close(pack(blocks).dequantize(), torch.from_numpy(expected), rtol=1e-6, atol=1e-6)


def test_cutting_and_joining_changes_nothing() -> None:
    first, second = (make(GGMLQuantizationType.Q4_1, seed=seed)[0] for seed in (1, 2))
    dense = [first.dequantise(), second.dequantise()]
    assert torch.equal(to_float(concatenate([first, second], 0)), torch.cat(dense, 0))
    assert torch.equal(to_float(concatenate([first, second], 1)), torch.cat(dense, 1))
    rows = torch.tensor([3, 1, 39])
    assert torch.equal(to_float(select_rows(first, rows)), dense[0][rows])
    assert torch.equal(first.select_columns(32, 96).dequantise(), dense[0][:, 32:96])
    with pytest.raises(ValueError, match=r"16\.\.96 do not lie on groups"):
        first.select_columns(16, 96)


def test_unlike_matrices_join_as_floats() -> None:
    blocks = make(GGMLQuantizationType.Q4_1)[0]
    dense = torch.ones((2, 96))
    joined = concatenate([blocks, dense], 0)
    assert isinstance(joined, torch.Tensor)
    assert torch.equal(joined, torch.cat([blocks.dequantise(), dense]))


def test_rotary_pairs_move_half_a_head_apart() -> None:
    assert half_split_order(2, 4).tolist() == [0, 2, 1, 3, 4, 6, 5, 7]
