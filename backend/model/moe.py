"""Mixture of experts with DeepSeek-V3's router, and shared experts.

A router that chooses every expert needs no sorting: one product over the stacked weights, each expert's
activations multiplied by its true combine weight, is the same sum.
"""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn import functional

from backend.model.config import ModelConfig, MoeConfig
from backend.model.linear import build_linear, pack, place
from backend.model.mlp import DenseMlp
from backend.model.placement import Placement
from backend.model.quant import Matrix, concatenate, to_float
from backend.model.weights import WeightReader
from kernels.expert_mlp import expert_mlp
from kernels.moe_gate import moe_gate
from kernels.native import NativeLibrary
from kernels.silu_mul import silu_mul


class Router:
    """Which experts a token goes to, and with what weights; always in float32."""

    def __init__(
        self, config: ModelConfig, moe: MoeConfig, reader: WeightReader, prefix: str, placement: Placement
    ) -> None:
        gate = to_float(reader.matrix(f"{prefix}.gate.weight", moe.num_experts, config.hidden_size))
        bias = reader.vector(f"{prefix}.gate.e_score_correction_bias", moe.num_experts)
        self._gate = gate.float().to(placement.device).contiguous()
        self._bias = bias.to(placement.device)
        self._moe = moe
        self._native = placement.native

    def __call__(self, x: Tensor) -> tuple[Tensor, Tensor]:
        """Weights ``[tokens, top_k]`` float32 and experts ``[tokens, top_k]`` int32, best first."""
        moe = self._moe
        return moe_gate(
            functional.linear(x.float(), self._gate),
            self._bias,
            moe.num_experts_per_token,
            num_groups=moe.num_groups,
            top_groups=moe.num_chosen_groups,
            normalise=moe.is_normalised,
            scale=moe.routed_scaling_factor,
            native=self._native,
        )


class MoeMlp:
    """Routed experts plus the shared ones of one layer."""

    def __init__(
        self, config: ModelConfig, moe: MoeConfig, reader: WeightReader, prefix: str, placement: Placement
    ) -> None:
        self._router = Router(config, moe, reader, prefix, placement)
        hidden, width = config.hidden_size, moe.expert_dim
        shapes = {"gate_proj": (width, hidden), "up_proj": (width, hidden), "down_proj": (hidden, width)}
        stacks = {
            name: [
                reader.matrix(f"{prefix}.experts.{e}.{name}.weight", *shape) for e in range(moe.num_experts)
            ]
            for name, shape in shapes.items()
        }
        self._shared: DenseMlp | None = None
        if moe.shared_dim:
            self._shared = DenseMlp(hidden, moe.shared_dim, reader, f"{prefix}.shared_experts", placement)
        gate_up = concatenate([*stacks["gate_proj"], *stacks["up_proj"]], 0)
        down = concatenate(stacks["down_proj"], 1)
        self._routed: AllExperts | PackedExperts | DenseExperts
        if moe.num_experts_per_token == moe.num_experts:
            self._routed = AllExperts(gate_up, down, moe.num_experts, placement)
        elif placement.native is not None:
            self._routed = PackedExperts(gate_up, down, placement.native)
        else:
            self._routed = DenseExperts(gate_up, down, moe.num_experts, placement)

    def add_to(self, residual: Tensor, x: Tensor) -> None:
        """``residual += experts(x) + shared(x)``; both ``[tokens, hidden]``."""
        weights, experts = self._router(x)
        self._routed.add_to(residual, x, weights, experts)
        if self._shared is not None:
            self._shared.add_to(residual, x)


class AllExperts:
    """Every expert for every token, over contiguous weights."""

    def __init__(self, gate_up: Matrix, down: Matrix, num_experts: int, placement: Placement) -> None:
        self._gate_up = build_linear(gate_up, placement)
        self._down = build_linear(down, placement)
        self._num_experts = num_experts
        self._native = placement.native

    def add_to(self, residual: Tensor, x: Tensor, weights: Tensor, experts: Tensor) -> None:
        inner = silu_mul(self._gate_up(x), native=self._native)
        combine = torch.empty_like(weights).scatter_(1, experts.long(), weights)
        inner.view(len(x), self._num_experts, -1).mul_(combine.unsqueeze(2))
        self._down.add_to(residual, inner)


class PackedExperts:
    """The chosen experts by the native kernel."""

    def __init__(self, gate_up: Matrix, down: Matrix, native: NativeLibrary) -> None:
        self._gate_up, self._down = pack(gate_up), pack(down)
        self._native = native

    def add_to(self, residual: Tensor, x: Tensor, weights: Tensor, experts: Tensor) -> None:
        expert_mlp(
            x, weights, experts, self._gate_up, self._down, out=residual, accumulate=True, native=self._native
        )


class DenseExperts:
    """The chosen experts in plain torch: one product per expert that any token chose."""

    def __init__(self, gate_up: Matrix, down: Matrix, num_experts: int, placement: Placement) -> None:
        gate, up = place(gate_up, placement).view(2, num_experts, -1, gate_up.shape[1])
        self._gate_up = torch.cat((gate, up), dim=1)
        wide = place(down, placement)
        self._down = wide.view(wide.shape[0], num_experts, -1).transpose(0, 1).contiguous()

    def add_to(self, residual: Tensor, x: Tensor, weights: Tensor, experts: Tensor) -> None:
        # Tokens sorted by expert; the sum runs in float32 and in ascending order of experts.
        top_k = experts.shape[1]
        order = experts.flatten().argsort(stable=True)
        counts = torch.bincount(experts.flatten(), minlength=len(self._gate_up)).tolist()
        tokens, scales = order // top_k, weights.flatten()[order]
        total = torch.zeros_like(residual, dtype=torch.float32)
        start = 0
        for expert, count in enumerate(counts):
            if count:
                chosen = tokens[start : start + count]
                inner = silu_mul(functional.linear(x[chosen], self._gate_up[expert]))
                out = functional.linear(inner, self._down[expert]).float()
                total.index_add_(0, chosen, out * scales[start : start + count, None])
                start += count
        residual += total.to(residual.dtype)
