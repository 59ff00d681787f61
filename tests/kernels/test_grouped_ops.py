"""Contracts and references of the ops for experts, 8-bit products and sampling; what a dry run says."""

from __future__ import annotations

import pytest
import torch

from kernels.fp8_gemm import fp8_gemm, quantise_rows
from kernels.grouped_gemm import grouped_gemm
from kernels.int4_gemm import int4_gemm
from kernels.moe_permute import moe_permute, moe_unpermute
from kernels.sample import sample
from tests.kernels.poison import assert_close


def test_rows_go_to_their_experts_and_back() -> None:
    x, chosen = torch.randn(6, 8), torch.tensor([[2, 0], [0, 1], [2, 1], [0, 2], [2, 0], [1, 0]]).int()
    weights, matrices = torch.rand(6, 2), torch.randn(3, 8, 8)
    rows, permutation = moe_permute(x, chosen, 3)
    assert permutation.starts.tolist() == [0, 5, 8, 12]
    products = grouped_gemm(rows, matrices, permutation.starts)
    expected = torch.stack(
        [sum(w * (matrices[e] @ x[t]) for w, e in zip(weights[t], chosen[t], strict=True)) for t in range(6)]
    )
    assert_close(moe_unpermute(products, permutation.places, weights), expected)


def test_nibbles_are_offset_binary() -> None:
    """Nibble i of a word is column i; 8 stands for zero."""
    packed = torch.tensor([[[0x76543210]]], dtype=torch.int32)
    product = int4_gemm(torch.eye(8), packed, torch.tensor([[[0.5]]]), torch.tensor([0, 8]).int())
    assert product.flatten().tolist() == [(nibble - 8) * 0.5 for nibble in range(8)]


def test_eight_bits_keep_a_product() -> None:
    x, weight = torch.randn(5, 200), torch.randn(130, 200)
    values, scales = quantise_rows(x)
    assert values.dtype == torch.float8_e4m3fn
    assert scales.shape == (5, 2)
    product = fp8_gemm(values, scales, weight.to(torch.float8_e4m3fn), torch.ones(2, 2), torch.float32)
    exact = x @ weight.T
    assert (product - exact).norm() < 0.05 * exact.norm()


def test_draws_follow_the_distribution_and_the_mask() -> None:
    logits = torch.tensor([0.1, 0.2, 0.4, 0.3]).log().repeat(1000, 1)
    draws = (torch.arange(1000) + 0.5) / 1000
    ones, zeros = torch.ones(1000), torch.zeros(1000)
    options = {"bitmask": None, "top_ks": zeros.int(), "top_ps": ones, "min_ps": zeros}
    assert sample(logits, ones, draws, **options).bincount().tolist() == [100, 200, 400, 300]
    assert sample(logits, zeros, draws, **options).unique().tolist() == [2]
    mask = torch.full((1000, 1), 0b0011, dtype=torch.int32)
    assert sample(logits, ones, draws, **(options | {"bitmask": mask})).unique().tolist() == [0, 1]
    assert sample(logits, ones, draws, **(options | {"top_ks": ones.int()})).unique().tolist() == [2]
    assert sample(logits, ones, draws, **(options | {"top_ps": ones * 0.6})).unique().tolist() == [2, 3]
    assert sample(logits, ones, draws, **(options | {"bitmask": mask * 0})).unique().tolist() == [-1]


def test_shapes_that_do_not_fit_are_named() -> None:
    starts = torch.tensor([0, 2]).int()
    with pytest.raises(ValueError, match="do not fit x"):
        grouped_gemm(torch.randn(2, 8), torch.randn(1, 4, 9), starts)
    with pytest.raises(ValueError, match="do not fit rows of 16"):
        int4_gemm(torch.randn(2, 16), torch.zeros(1, 4, 1).int(), torch.ones(1, 4, 1), starts)
    with pytest.raises(ValueError, match="experts must have 2 rows"):
        moe_permute(torch.randn(2, 4), torch.zeros(3, 1).int(), 2)
    with pytest.raises(ValueError, match="weight_scales"):
        fp8_gemm(torch.randn(2, 8), torch.ones(2, 1), torch.randn(4, 8), torch.ones(2, 1))
    ones = torch.ones(2)
    with pytest.raises(ValueError, match="bitmask"):
        sample(torch.randn(2, 40), ones, ones, bitmask=torch.zeros(2, 1).int(), top_ks=ones, top_ps=ones,
               min_ps=ones)  # fmt: skip


@pytest.mark.skipif(torch.cuda.is_available(), reason="a GPU is at hand: nothing runs dry")
def test_a_dry_run_says_what_it_would_do(capsys: pytest.CaptureFixture[str]) -> None:
    pytest.importorskip("triton", reason="Triton comes for Linux only")
    from kernels.gpu_check import main

    assert main(["--no-compile", "--only", "int4_gemm"]) == 0
    said = capsys.readouterr().out
    assert "would start multiply_packed_groups x 26624" in said
    assert said.endswith("3 trials planned, nothing was run on a GPU.\n")
    assert main(["--no-compile", "--only", "no such op"]) == 1
