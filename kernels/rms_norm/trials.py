"""Trials of the normalisation: small ones for the interpreter, Kimi K2.5's for a GPU."""

from __future__ import annotations

from functools import partial

from torch.nn.functional import rms_norm as torch_rms_norm

from kernels.rms_norm import kernel, reference
from kernels.trial import Prepared, Setting, Trial


def prepare(
    setting: Setting, *, rows: int, width: int, has_residual: bool = False, has_weight: bool = True
) -> Prepared:
    """``rows x width``; the input is a slice of wider rows."""
    x = setting.normal(rows, width + 3)[:, 1 : width + 1] if rows < 100 else setting.normal(rows, width)
    residual = setting.normal(rows, width)
    weight = setting.normal(width) if has_weight else None
    size = x.element_size()
    if has_residual:
        return Prepared(
            lambda launch: (kernel.add_rms_norm(x, residual, weight, 1e-5, launch=launch), residual),
            lambda: (reference.add_rms_norm(x, copy := residual.clone(), weight, 1e-5), copy),
            4 * rows * width * size,
            6 * rows * width,
        )
    return Prepared(
        lambda launch: (kernel.rms_norm(x, weight, 1e-5, launch=launch),),
        lambda: (reference.rms_norm(x, weight, 1e-5),),
        2 * rows * width * size,
        5 * rows * width,
        {"torch": lambda: torch_rms_norm(x, (width,), weight, 1e-5)},
    )


SMALL = (
    Trial("rms_norm", "5 x 576", partial(prepare, rows=5, width=576)),
    Trial("rms_norm", "3 x 13, no weight", partial(prepare, rows=3, width=13, has_weight=False)),
    Trial("rms_norm", "4 x 100, residual", partial(prepare, rows=4, width=100, has_residual=True)),
)
REAL = (
    Trial("rms_norm", "decode 64 x 7168, residual", partial(prepare, rows=64, width=7168, has_residual=True)),
    Trial("rms_norm", "prefill 8192 x 7168", partial(prepare, rows=8192, width=7168)),
    Trial(
        "rms_norm",
        "prefill 8192 x 7168, residual",
        partial(prepare, rows=8192, width=7168, has_residual=True),
    ),
    Trial("rms_norm", "latents 8192 x 512", partial(prepare, rows=8192, width=512)),
)
