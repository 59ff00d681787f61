from __future__ import annotations

from typing import Literal

import pytest
import torch

from kernels.packed_linear import PackedWeight
from kernels.packed_linear.cases import EDGES, SMOLLM2, LinearCase


def affine(codes: torch.Tensor, scales: torch.Tensor, minima: torch.Tensor) -> torch.Tensor:
    wide = scales.double().repeat_interleave(32, 1) * codes + minima.double().repeat_interleave(32, 1)
    return wide.float()


@pytest.mark.parametrize("bits", [4, 8])
@pytest.mark.parametrize("rows", [1, 31, 32, 70])
def test_packing_loses_nothing(bits: int, rows: int) -> None:
    codes = torch.randint(0, 2**bits, (rows, 96), dtype=torch.uint8)
    scales, minima = torch.rand(rows, 3).half(), torch.randn(rows, 3).half()
    weight = PackedWeight.pack(codes, scales, minima, bits)
    assert not weight.has_wide_scales
    assert torch.equal(weight.dequantize(), affine(codes, scales, minima))
    assert torch.equal(weight.widened().dequantize(), weight.dequantize())


def test_scales_that_float16_cannot_hold_stay_float32() -> None:
    codes = torch.randint(0, 16, (5, 32), dtype=torch.uint8)
    scales, minima = torch.rand(5, 1) * 1e-6, torch.randn(5, 1)
    weight = PackedWeight.pack(codes, scales, minima, 4)
    assert weight.has_wide_scales
    assert torch.equal(weight.dequantize(), affine(codes, scales, minima))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_dense_weights_come_back_exactly(dtype: torch.dtype) -> None:
    dense = torch.randn(70, 34).to(dtype)
    weight = PackedWeight.from_dense(dense)
    assert weight.bits == (16 if dtype is torch.bfloat16 else 32)
    assert torch.equal(weight.dequantize(), dense.float())


@pytest.mark.parametrize("case", [*EDGES, SMOLLM2[0]], ids=lambda case: case.name)
def test_rows_are_those_of_the_matrix(case: LinearCase) -> None:
    weight = case.weight()
    rows = torch.tensor([case.out_features - 1, 0, 3, 3])
    assert torch.equal(weight.dequantize_rows(rows), weight.dequantize()[rows])


def test_concatenated_weights_stack_and_widen() -> None:
    narrow, wide = LinearCase("a", 64, 64, 4).weight(1), LinearCase("b", 33, 64, 4, is_wide=True).weight(2)
    both = PackedWeight.concatenate([narrow, wide])
    assert both.out_features == 97
    assert torch.equal(both.dequantize(), torch.cat((narrow.dequantize(), wide.dequantize())))


@pytest.mark.parametrize("bits", [4, 8, 16, 32])
def test_weights_side_by_side_are_one_wide_weight(bits: Literal[4, 8, 16, 32]) -> None:
    first, second = (LinearCase("a", 40, columns, bits).weight(columns) for columns in (64, 32))
    both = PackedWeight.concatenate_columns([first, second])
    assert (both.out_features, both.in_features) == (40, 96)
    assert torch.equal(both.dequantize(), torch.cat((first.dequantize(), second.dequantize()), dim=1))
    wide = LinearCase("b", 40, 64, bits, is_wide=True).weight(2)
    mixed = PackedWeight.concatenate_columns([first, wide])
    assert torch.equal(mixed.dequantize(), torch.cat((first.dequantize(), wide.dequantize()), dim=1))


def test_wrong_shapes_are_refused() -> None:
    codes = torch.zeros((4, 64), dtype=torch.uint8)
    with pytest.raises(ValueError, match="do not fit scales"):
        PackedWeight.pack(codes, torch.ones(4, 1), torch.ones(4, 1), 4)
    with pytest.raises(ValueError, match="even number of columns"):
        PackedWeight.from_dense(torch.zeros(4, 3, dtype=torch.bfloat16))
    odd, wide = LinearCase("a", 33, 64, 4).weight(), LinearCase("b", 32, 32, 4).weight()
    with pytest.raises(ValueError, match="multiple of 32 rows"):
        PackedWeight.concatenate([odd, odd])
    with pytest.raises(ValueError, match="one in_features"):
        PackedWeight.concatenate([wide, odd])
    with pytest.raises(ValueError, match="one out_features"):
        PackedWeight.concatenate_columns([wide, odd])
