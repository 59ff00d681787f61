"""Mixture of experts with DeepSeek-V3's router, and shared experts.

A router that chooses every expert needs no sorting: one SwiGLU layer over the stacked weights, each expert's
neurons multiplied by its true combine weight, is the same sum, and shared experts are parts of weight one.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import replace
from typing import Protocol

import torch
from torch import Tensor
from torch.nn import functional

from backend.model.config import ModelConfig, MoeConfig
from backend.model.errors import UnsupportedModelError
from backend.model.linear import alike, build_linear, pack, place
from backend.model.mlp import DenseMlp, build_swiglu, read_swiglu
from backend.model.placement import Placement
from backend.model.quant import Matrix, concatenate, to_float
from backend.model.weights import WeightReader
from kernels.expert_mlp import expert_mlp
from kernels.moe_gate import moe_gate, weigh_all
from kernels.native import NativeLibrary
from kernels.packed_linear import PackedWeight
from kernels.silu_mul import silu_mul


class Router:
    """Which experts a token goes to, and with what weights; always in float32."""

    def __init__(
        self, config: ModelConfig, moe: MoeConfig, reader: WeightReader, prefix: str, placement: Placement
    ) -> None:
        gate = to_float(reader.matrix(f"{prefix}.gate.weight", moe.num_experts, config.hidden_size))
        bias = reader.vector(f"{prefix}.gate.e_score_correction_bias", moe.num_experts)
        # Near-ties flip experts in a narrower type, and experts must not depend on the rest of the batch.
        wide = replace(placement, dtype=torch.float32)
        self._gate = build_linear(gate.float(), wide)
        self._bias = bias.to(placement.device)
        self._moe = moe
        self._native = placement.native

    def choose(self, x: Tensor) -> tuple[Tensor, Tensor]:
        """Weights ``[tokens, top_k]`` float32 and experts ``[tokens, top_k]`` int32, best first."""
        moe = self._moe
        return moe_gate(
            self._gate(x.float()),
            self._bias,
            moe.num_experts_per_token,
            num_groups=moe.num_groups,
            top_groups=moe.num_chosen_groups,
            normalise=moe.is_normalised,
            scale=moe.routed_scaling_factor,
            native=self._native,
        )

    def weigh_all(self, x: Tensor, num_shared: int) -> Tensor:
        """Every expert's weight, for a router that chooses all; ones for shared experts come first."""
        return weigh_all(
            self._gate(x.float()),
            num_leading=num_shared,
            normalise=self._moe.is_normalised,
            scale=self._moe.routed_scaling_factor,
            native=self._native,
        )


Expert = tuple[Matrix, Matrix, Matrix]
"""Gate, up and down of one expert."""


class ChosenExperts(Protocol):
    """The weighted sum of the experts chosen for each token."""

    def __call__(self, x: Tensor, weights: Tensor, experts: Tensor) -> Tensor: ...


class SparseMoeMlp:
    """Some of the experts for each token, and the shared ones for all."""

    def __init__(
        self, config: ModelConfig, moe: MoeConfig, reader: WeightReader, prefix: str, placement: Placement
    ) -> None:
        self._router = Router(config, moe, reader, prefix, placement)
        experts = _read_experts(config, moe, reader, prefix)
        self._routed: ChosenExperts
        if placement.native is not None:
            self._routed = PackedExperts(experts, moe.num_experts, prefix, placement.native)
        else:
            self._routed = DenseExperts(experts, config, moe, placement)
        self._shared: DenseMlp | None = None
        if moe.shared_dim:
            shared = f"{prefix}.shared_experts"
            self._shared = DenseMlp(config.hidden_size, moe.shared_dim, reader, shared, placement)

    def __call__(self, x: Tensor) -> Tensor:
        """``[tokens, hidden]`` to the same."""
        routed = self._routed(x, *self._router.choose(x))
        return routed if self._shared is None else routed.add_(self._shared(x))


class FullMoeMlp:
    """Every expert for every token."""

    def __init__(
        self, config: ModelConfig, moe: MoeConfig, reader: WeightReader, prefix: str, placement: Placement
    ) -> None:
        self._router = Router(config, moe, reader, prefix, placement)
        self._num_shared = moe.shared_dim // moe.expert_dim
        experts = list(_read_experts(config, moe, reader, prefix))
        if moe.shared_dim:
            shared = read_swiglu(reader, f"{prefix}.shared_experts", config.hidden_size, moe.shared_dim)
            experts.insert(0, shared)
        gates, ups, downs = zip(*experts, strict=True)
        num_parts = self._num_shared + moe.num_experts
        self._swiglu = build_swiglu(
            concatenate([*gates, *ups], 0), concatenate(downs, 1), num_parts, placement
        )

    def __call__(self, x: Tensor) -> Tensor:
        """``[tokens, hidden]`` to the same."""
        return self._swiglu(x, self._router.weigh_all(x, self._num_shared))


class PackedExperts:
    """The chosen experts by the native kernel.

    Experts are packed one by one, so that a layer is never held in more than its two packed copies.

    Raises:
        UnsupportedModelError: when the layer's matrices are not all of one form.
    """

    def __init__(
        self, experts: Iterable[Expert], num_experts: int, prefix: str, native: NativeLibrary
    ) -> None:
        gates, ups, downs = [], [], []
        for gate, up, down in experts:
            gates.append(pack(gate))
            ups.append(pack(up))
            downs.append(pack(down))
        if len({weight.bits for weight in (*gates, *ups, *downs)}) > 1:
            raise UnsupportedModelError(f"{prefix}.experts: not all stored in one form")
        gate_up = PackedWeight.concatenate([*gates, *ups])
        gates.clear()
        ups.clear()
        self._gate_up, self._down = alike(gate_up, PackedWeight.concatenate_columns(downs))
        self._num_experts = num_experts
        self._native = native

    def __call__(self, x: Tensor, weights: Tensor, experts: Tensor) -> Tensor:
        return expert_mlp(
            x, weights, experts, self._gate_up, self._down, num_experts=self._num_experts, native=self._native
        )


class DenseExperts:
    """The chosen experts in plain torch: one product per expert that any token chose."""

    def __init__(
        self, experts: Iterable[Expert], config: ModelConfig, moe: MoeConfig, placement: Placement
    ) -> None:
        width, hidden = moe.expert_dim, config.hidden_size
        self._gate_up = placement.empty(moe.num_experts, 2 * width, hidden)
        self._down = placement.empty(moe.num_experts, hidden, width)
        for index, (gate, up, down) in enumerate(experts):
            self._gate_up[index, :width] = place(gate, placement)
            self._gate_up[index, width:] = place(up, placement)
            self._down[index] = place(down, placement)

    def __call__(self, x: Tensor, weights: Tensor, experts: Tensor) -> Tensor:
        # Tokens sorted by expert; the sum runs in float32 and in ascending order of experts.
        top_k = experts.shape[1]
        order = experts.flatten().argsort(stable=True)
        counts = torch.bincount(experts.flatten(), minlength=len(self._gate_up)).tolist()
        tokens, scales = order // top_k, weights.flatten()[order]
        total = torch.zeros_like(x, dtype=torch.float32)
        start = 0
        for expert, count in enumerate(counts):
            if count:
                chosen = tokens[start : start + count]
                inner = silu_mul(functional.linear(x[chosen], self._gate_up[expert]))
                out = functional.linear(inner, self._down[expert]).float()
                total.index_add_(0, chosen, out * scales[start : start + count, None])
                start += count
        return total.to(x.dtype)


def _read_experts(config: ModelConfig, moe: MoeConfig, reader: WeightReader, prefix: str) -> Iterator[Expert]:
    for expert in range(moe.num_experts):
        yield read_swiglu(reader, f"{prefix}.experts.{expert}", config.hidden_size, moe.expert_dim)
