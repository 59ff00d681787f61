"""SwiGLU feed-forward layers: ``down(factor * silu(gate x) * up x)``, whole or cut into weighted parts."""

from __future__ import annotations

from typing import Protocol

import torch
from torch import Tensor

from backend.model.linear import alike, build_linear, pack
from backend.model.placement import Placement
from backend.model.quant import AffineBlocks, Matrix, concatenate
from backend.model.weights import WeightReader
from kernels.expert_mlp import expert_mlp
from kernels.native import NativeLibrary
from kernels.silu_mul import silu_mul


class SwiGlu(Protocol):
    """A layer whose neurons form parts of equal width; each part's output is multiplied by its factor."""

    def __call__(self, x: Tensor, factors: Tensor | None = None) -> Tensor:
        """``[tokens, hidden]`` to the same; ``factors`` ``[tokens, parts]`` float32, None for ones."""
        ...


class ProductSwiGlu:
    """Two products with the gate between them."""

    def __init__(self, gate_up: Matrix, down: Matrix, num_parts: int, placement: Placement) -> None:
        self._gate_up = build_linear(gate_up, placement)
        self._down = build_linear(down, placement)
        self._num_parts = num_parts
        self._native = placement.native

    def __call__(self, x: Tensor, factors: Tensor | None = None) -> Tensor:
        inner = silu_mul(self._gate_up(x), native=self._native)
        if factors is not None:
            parts = inner.view(len(x), self._num_parts, -1)
            inner = (parts * factors.unsqueeze(2).to(parts.dtype)).view_as(inner)
        return self._down(inner)


class FusedSwiGlu:
    """The whole layer in one native call: the experts' kernel with every part chosen."""

    def __init__(self, gate_up: Matrix, down: Matrix, num_parts: int, native: NativeLibrary) -> None:
        self._gate_up, self._down = alike(pack(gate_up), pack(down))
        self._parts = torch.arange(num_parts, dtype=torch.int32)[None]
        self._native = native

    def __call__(self, x: Tensor, factors: Tensor | None = None) -> Tensor:
        num_parts = self._parts.shape[1]
        return expert_mlp(
            x,
            torch.ones((len(x), num_parts)) if factors is None else factors,
            self._parts.expand(len(x), -1).contiguous(),
            self._gate_up,
            self._down,
            num_experts=num_parts,
            native=self._native,
        )


class DenseMlp:
    """The feed-forward layer of a dense model, or a shared expert."""

    def __init__(
        self, hidden: int, width: int, reader: WeightReader, prefix: str, placement: Placement
    ) -> None:
        gate, up, down = read_swiglu(reader, prefix, hidden, width)
        self._swiglu = build_swiglu(concatenate([gate, up], 0), down, 1, placement)

    def __call__(self, x: Tensor) -> Tensor:
        """``[tokens, hidden]`` to the same."""
        return self._swiglu(x)


def read_swiglu(reader: WeightReader, prefix: str, hidden: int, width: int) -> tuple[Matrix, Matrix, Matrix]:
    """Gate and up ``[width, hidden]``, down ``[hidden, width]``."""
    gate = reader.matrix(f"{prefix}.gate_proj.weight", width, hidden)
    up = reader.matrix(f"{prefix}.up_proj.weight", width, hidden)
    return gate, up, reader.matrix(f"{prefix}.down_proj.weight", hidden, width)


def build_swiglu(gate_up: Matrix, down: Matrix, num_parts: int, placement: Placement) -> SwiGlu:
    """A layer of ``gate_up`` ``[2 * inner, hidden]``, all gates above all ups, and ``down``."""
    if placement.native is not None and is_packed_alike(gate_up, down):
        return FusedSwiGlu(gate_up, down, num_parts, placement.native)
    return ProductSwiGlu(gate_up, down, num_parts, placement)


def is_packed_alike(first: Matrix, second: Matrix) -> bool:
    """Whether two matrices have one packed form, so that one native call can read both."""
    if isinstance(first, AffineBlocks) and isinstance(second, AffineBlocks):
        return first.bits == second.bits
    if isinstance(first, Tensor) and isinstance(second, Tensor):
        return first.dtype == second.dtype
    return False
