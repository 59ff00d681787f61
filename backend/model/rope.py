"""Rotary position embedding: the table of cosines and sines, plain or YaRN."""

from __future__ import annotations

from dataclasses import dataclass
from math import ceil, floor, log, pi

import torch
from torch import Tensor

from backend.model.config import RopeConfig


@dataclass(frozen=True, slots=True)
class RopeTable:
    """``cos`` and ``sin``: ``[max_positions, dim / 2]`` float32; pairing is the config's."""

    cos: Tensor
    sin: Tensor
    is_interleaved: bool

    def at(self, positions: Tensor) -> tuple[Tensor, Tensor]:
        """The rows of ``positions`` (``[T]``): two ``[T, dim / 2]`` tensors."""
        return self.cos.index_select(0, positions), self.sin.index_select(0, positions)


def build_rope_table(config: RopeConfig, max_positions: int, device: torch.device) -> RopeTable:
    """The table for positions ``0 .. max_positions - 1``.

    Angles are float32 products of float32 frequencies, as in the code that these models were trained with:
    a better table would not be the model's own.
    """
    angles = torch.outer(torch.arange(max_positions, dtype=torch.float32), inverse_frequencies(config))
    factor = config.yarn.cos_sin_factor if config.yarn else 1.0
    return RopeTable(
        cos=(angles.cos() * factor).to(device),
        sin=(angles.sin() * factor).to(device),
        is_interleaved=config.is_interleaved,
    )


def inverse_frequencies(config: RopeConfig) -> Tensor:
    """Radians per position of each pair, ``[dim / 2]`` float32."""
    exponents = torch.arange(0, config.dim, 2, dtype=torch.int64).float() / config.dim
    plain = 1.0 / config.theta**exponents
    yarn = config.yarn
    if yarn is None:
        return plain

    def pair_turning(turns: float) -> float:
        """The (fractional) pair that makes ``turns`` full turns over the original context."""
        return (
            config.dim
            * log(yarn.original_max_position_embeddings / (turns * 2 * pi))
            / (2 * log(config.theta))
        )

    low = max(floor(pair_turning(yarn.beta_fast)), 0)
    high = min(ceil(pair_turning(yarn.beta_slow)), config.dim - 1)
    ramp = (torch.arange(config.dim // 2, dtype=torch.float32) - low) / max(high - low, 1e-3)
    # In the order of the models' own code: at position 262,143 the last bit of a frequency turns a key by
    # 1/64 rad.
    kept = 1 - ramp.clamp(0, 1)
    return 1.0 / (yarn.factor * config.theta**exponents) * (1 - kept) + plain * kept
