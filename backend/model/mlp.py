"""The dense SwiGLU feed-forward layer."""

from __future__ import annotations

from torch import Tensor

from backend.model.linear import build_linear
from backend.model.placement import Placement
from backend.model.quant import concatenate
from backend.model.weights import WeightReader
from kernels.silu_mul import silu_mul


class DenseMlp:
    """``down(silu(gate x) * up x)``; gate and up are one product."""

    def __init__(
        self, hidden: int, width: int, reader: WeightReader, prefix: str, placement: Placement
    ) -> None:
        gate = reader.matrix(f"{prefix}.gate_proj.weight", width, hidden)
        up = reader.matrix(f"{prefix}.up_proj.weight", width, hidden)
        self._gate_up = build_linear(concatenate([gate, up], 0), placement)
        self._down = build_linear(reader.matrix(f"{prefix}.down_proj.weight", hidden, width), placement)
        self._native = placement.native

    def add_to(self, residual: Tensor, x: Tensor) -> None:
        """``residual += mlp(x)``; both ``[tokens, hidden]``."""
        self._down.add_to(residual, silu_mul(self._gate_up(x), native=self._native))
