"""Trials of the rotation."""

from __future__ import annotations

from functools import partial

import torch
from torch import Tensor

from kernels.launching import Launcher
from kernels.rope import kernel, reference
from kernels.trial import Prepared, Setting, Trial


def prepare(
    setting: Setting, *, tokens: int, heads: int, dim: int, before: int, interleaved: bool
) -> Prepared:
    """The last ``dim`` of ``before + dim`` columns of every head are rotated; the others must stay."""
    fused = setting.normal(tokens, heads, before + dim)
    angles = setting.normal(tokens, dim // 2, scale=10.0, dtype=torch.float32)
    cos, sin = setting.place(angles.cos()), setting.place(angles.sin())

    def run(launch: Launcher) -> tuple[Tensor]:
        kernel.rope(fused[..., before:], cos, sin, interleaved=interleaved, launch=launch)
        return (fused,)

    def expect() -> tuple[Tensor]:
        rotated = fused.clone()
        reference.rope(rotated[..., before:], cos, sin, interleaved=interleaved)
        return (rotated,)

    size = 2 * tokens * heads * dim * fused.element_size() + 2 * cos.nbytes
    return Prepared(run, expect, size, 3 * tokens * heads * dim)


SMALL = (
    Trial("rope", "interleaved", partial(prepare, tokens=3, heads=5, dim=12, before=7, interleaved=True)),
    Trial("rope", "halves", partial(prepare, tokens=3, heads=3, dim=64, before=0, interleaved=False)),
)
REAL = (
    Trial("rope", "decode 64 x 64 heads of 64 behind 128", partial(
        prepare, tokens=64, heads=64, dim=64, before=128, interleaved=True)),
    Trial("rope", "prefill 8192 x 64 heads of 64 behind 128", partial(
        prepare, tokens=8192, heads=64, dim=64, before=128, interleaved=True)),
    Trial("rope", "prefill 8192 x 32 heads of 128, halves", partial(
        prepare, tokens=8192, heads=32, dim=128, before=0, interleaved=False)),
)  # fmt: skip
