"""moe_gate and expert_mlp."""

from __future__ import annotations

import pytest
import torch

from kernels.expert_mlp import expert_mlp
from kernels.expert_mlp.cases import CASES as EXPERT_CASES
from kernels.expert_mlp.cases import ExpertCase
from kernels.moe_gate import moe_gate, weigh_all
from kernels.moe_gate.cases import CASES, GateCase
from kernels.native import NativeLibrary
from tests.kernels.poison import assert_close, surrounded


def choose(
    case: GateCase, logits: torch.Tensor, bias: torch.Tensor | None, native: NativeLibrary | None
) -> tuple[torch.Tensor, torch.Tensor]:
    return moe_gate(
        logits, bias, case.top_k, num_groups=case.num_groups, top_groups=case.top_groups,
        normalise=case.normalise, scale=case.scale, native=native,
    )  # fmt: skip


@pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)
@pytest.mark.parametrize("tokens", [1, 40])
@pytest.mark.parametrize("has_bias", [True, False])
def test_gate_native_equals_the_reference(
    case: GateCase, tokens: int, has_bias: bool, native: NativeLibrary
) -> None:
    logits = torch.randn(tokens, case.experts)
    bias = torch.randn(case.experts) * 0.3 if has_bias else None
    weights, chosen = choose(case, surrounded(logits), bias, native)
    expected_weights, expected = choose(case, logits, bias, None)
    assert torch.equal(chosen, expected)
    assert_close(weights, expected_weights)
    alone, _ = choose(case, logits[:1].clone(), bias, native)
    assert torch.equal(alone, weights[:1])


@pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)
def test_ties_go_to_the_lower_index(case: GateCase, native: NativeLibrary) -> None:
    logits = torch.zeros(3, case.experts)
    _, chosen = choose(case, logits, None, native)
    _, expected = choose(case, logits, None, None)
    assert torch.equal(chosen, expected)
    assert torch.equal(chosen[0], chosen[0].sort().values)


@pytest.mark.parametrize("experts", [3, 36])
@pytest.mark.parametrize("normalise", [True, False])
def test_weights_of_all_experts(experts: int, normalise: bool, native: NativeLibrary) -> None:
    logits = torch.randn(5, experts)
    result = weigh_all(surrounded(logits), num_leading=2, normalise=normalise, scale=2.5, native=native)
    assert_close(result, weigh_all(logits, num_leading=2, normalise=normalise, scale=2.5))
    weights, chosen = moe_gate(logits, None, experts, normalise=normalise, scale=2.5, native=native)
    assert_close(result[:, 2:].gather(1, chosen.long()), weights)
    alone = weigh_all(logits[:1].clone(), num_leading=2, normalise=normalise, scale=2.5, native=native)
    assert torch.equal(alone, result[:1])


def test_bias_chooses_but_does_not_weigh() -> None:
    logits = torch.tensor([[2.0, 1.0, 0.0]])
    weights, chosen = moe_gate(logits, torch.tensor([0.0, 0.0, 5.0]), 2, normalise=False)
    assert chosen.tolist() == [[2, 0]]
    assert_close(weights, torch.sigmoid(torch.tensor([[0.0, 2.0]])))


def test_impossible_choices_are_refused() -> None:
    with pytest.raises(ValueError, match=r"top_k 5 must lie in 1\.\.4"):
        moe_gate(torch.zeros(1, 8), None, 5, num_groups=4, top_groups=2)
    with pytest.raises(ValueError, match="cannot be chosen"):
        moe_gate(torch.zeros(1, 8), None, 1, num_groups=3)


def routed(case: ExpertCase, tokens: int) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    weights, experts = moe_gate(torch.randn(tokens, case.num_experts), None, case.top_k)
    return torch.randn(tokens, case.hidden), weights, experts


@pytest.mark.parametrize("case", EXPERT_CASES, ids=lambda case: case.name)
@pytest.mark.parametrize("tokens", [1, 2, 17])
def test_experts_native_equals_the_reference(case: ExpertCase, tokens: int, native: NativeLibrary) -> None:
    (x, weights, experts), (gate_up, down) = routed(case, tokens), case.packed()
    result = expert_mlp(surrounded(x), weights, experts, gate_up, down, case.num_experts, native=native)
    assert_close(result, expert_mlp(x, weights, experts, gate_up, down, case.num_experts))
    alone = expert_mlp(
        x[:1].clone(), weights[:1], experts[:1], gate_up, down, case.num_experts, native=native
    )
    assert torch.equal(alone, result[:1])


@pytest.mark.parametrize("case", EXPERT_CASES[1:3], ids=lambda case: case.name)
def test_experts_accumulate(case: ExpertCase, native: NativeLibrary) -> None:
    (x, weights, experts), (gate_up, down) = routed(case, 4), case.packed()
    start = torch.randn(4, case.hidden)
    out = start.clone()
    expert_mlp(x, weights, experts, gate_up, down, case.num_experts, out=out, accumulate=True, native=native)
    expected = expert_mlp(x, weights, experts, gate_up, down, case.num_experts, out=start, accumulate=True)
    assert_close(out, expected)


def test_all_experts_at_once_have_the_bits_of_one_after_another(native: NativeLibrary) -> None:
    """The stacked product against the sorted one, which a weight of zero for one more expert brings about."""
    case = ExpertCase("all", 64, 32, 6, 6)
    (x, weights, experts), (gate_up, down) = routed(case, 5), case.packed()
    stacked = expert_mlp(x, weights, experts, gate_up, down, 6, native=native)
    dead = ExpertCase("all and one", 64, 32, 7, 6)
    gate_up_more, down_more = dead.packed()
    gates, ups = gate_up.data.view(2, 6, *gate_up.data.shape[1:])
    gate_up_more.data.view(2, 7, *gate_up.data.shape[1:])[:, :6] = torch.stack((gates, ups))
    down_more.data[:, :6] = down.data
    assert torch.equal(expert_mlp(x, weights, experts, gate_up_more, down_more, 7, native=native), stacked)


def test_experts_that_do_not_fit_are_refused(native: NativeLibrary) -> None:
    case = EXPERT_CASES[3]
    (x, weights, experts), (gate_up, down) = routed(case, 1), case.packed()
    with pytest.raises(ValueError, match="do not fit x"):
        expert_mlp(x[:, :32], weights, experts, gate_up, down, 6)
    with pytest.raises(ValueError, match="multiple of 32 wide"):
        expert_mlp(x, weights, experts, gate_up, down, 12, native=native)
    with pytest.raises(ValueError, match="accumulate needs out"):
        expert_mlp(x, weights, experts, gate_up, down, 6, accumulate=True)
