"""Trials of SwiGLU's gate."""

from __future__ import annotations

from functools import partial

from kernels.silu_mul import kernel, reference
from kernels.trial import Prepared, Setting, Trial


def prepare(setting: Setting, *, rows: int, width: int) -> Prepared:
    """``rows x 2 width``, with numbers that saturate the sigmoid."""
    gate_up = setting.normal(rows, 2 * width, scale=4.0)
    if setting.device == "cpu":
        gate_up[0, 0], gate_up[0, width - 1] = 100.0, -100.0
    return Prepared(
        lambda launch: (kernel.silu_mul(gate_up, launch=launch),),
        lambda: (reference.silu_mul(gate_up),),
        3 * rows * width * gate_up.element_size(),
        5 * rows * width,
        {"torch": lambda: reference.silu_mul(gate_up)},
    )


SMALL = (
    Trial("silu_mul", "3 x 1500", partial(prepare, rows=3, width=1500)),
    Trial("silu_mul", "2 x 13", partial(prepare, rows=2, width=13)),
)
REAL = (
    Trial("silu_mul", "decode 512 x 2048", partial(prepare, rows=512, width=2048)),
    Trial("silu_mul", "prefill 8192 x 18432", partial(prepare, rows=8192, width=18432)),
)
