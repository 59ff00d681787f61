"""rms_norm, silu_mul, rope."""

from __future__ import annotations

import pytest
import torch

from kernels.native import NativeLibrary
from kernels.rms_norm import add_rms_norm, rms_norm
from kernels.rope import rope
from kernels.silu_mul import silu_mul
from tests.kernels.poison import assert_close, surrounded


@pytest.mark.parametrize("width", [1, 7, 8, 64, 576, 577])
@pytest.mark.parametrize("rows", [1, 3, 40])
@pytest.mark.parametrize("has_weight", [True, False])
def test_rms_norm(width: int, rows: int, has_weight: bool, native: NativeLibrary) -> None:
    x = torch.randn(rows, width) * 3
    weight = torch.randn(width) if has_weight else None
    result = rms_norm(surrounded(x), weight, 1e-5, native=native)
    assert_close(result, rms_norm(x, weight, 1e-5))
    assert torch.equal(result[:1], rms_norm(x[:1].clone(), weight, 1e-5, native=native))


@pytest.mark.parametrize("rows", [1, 40])
def test_add_rms_norm_updates_the_residual(rows: int, native: NativeLibrary) -> None:
    x, residual, weight = torch.randn(rows, 576), torch.randn(rows, 576), torch.randn(576)
    expected_residual = residual.clone()
    expected = add_rms_norm(x, expected_residual, weight, 1e-6)
    actual_residual = surrounded(residual)
    assert_close(add_rms_norm(x, actual_residual, weight, 1e-6, native=native), expected)
    assert torch.equal(actual_residual, expected_residual)


@pytest.mark.parametrize("width", [1, 8, 13, 1536])
@pytest.mark.parametrize("rows", [1, 3, 40])
def test_silu_mul(width: int, rows: int, native: NativeLibrary) -> None:
    gate_up = torch.randn(rows, 2 * width) * 6
    gate_up[0, 0] = 200.0
    gate_up[0, width - 1] = -200.0
    result = silu_mul(surrounded(gate_up), native=native)
    assert_close(result, silu_mul(gate_up))
    assert torch.equal(result[:1], silu_mul(gate_up[:1].clone(), native=native))


def test_a_nan_is_not_swallowed(native: NativeLibrary) -> None:
    assert silu_mul(torch.full((1, 16), torch.nan), native=native).isnan().all()
    assert rms_norm(torch.full((1, 16), torch.nan), None, 1e-5, native=native).isnan().all()


@pytest.mark.parametrize("interleaved", [True, False])
@pytest.mark.parametrize("dim", [2, 64, 192])
@pytest.mark.parametrize("tokens", [1, 5, 40])
def test_rope_of_a_slice(interleaved: bool, dim: int, tokens: int, native: NativeLibrary) -> None:
    fused = torch.randn(tokens, 4 * dim + 5)
    angles = torch.randn(tokens, dim // 2) * 10
    expected = fused.clone()
    rope(
        expected[:, 3 : 3 + 4 * dim].view(tokens, 4, dim), angles.cos(), angles.sin(), interleaved=interleaved
    )
    actual = surrounded(fused)
    part = actual[:, 3 : 3 + 4 * dim].view(tokens, 4, dim)
    rope(part, angles.cos(), angles.sin(), interleaved=interleaved, native=native)
    assert_close(actual, expected)


def test_rope_keeps_lengths_and_relative_angles() -> None:
    x = torch.randn(1, 1, 8).expand(2, 1, 8).clone()
    angles = torch.tensor([[0.1, 0.2, 0.3, 0.4], [1.1, 1.2, 1.3, 1.4]])
    before = x.clone()
    rope(x, angles.cos(), angles.sin(), interleaved=True)
    assert_close(x.norm(dim=-1), before.norm(dim=-1))
    with pytest.raises(ValueError, match="cos and sin must be"):
        rope(x, angles.cos()[:1], angles.sin()[:1], interleaved=True)


def test_wrong_widths_are_named(native: NativeLibrary) -> None:
    with pytest.raises(ValueError, match="weight must be"):
        rms_norm(torch.randn(2, 8), torch.randn(7), 1e-5, native=native)
    with pytest.raises(ValueError, match="even last dimension"):
        silu_mul(torch.randn(2, 7), native=native)
