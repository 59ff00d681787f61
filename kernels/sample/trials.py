"""Trials of sampling."""

from __future__ import annotations

from functools import partial

import torch

from kernels.sample import GREEDY_BELOW_TEMPERATURE, kernel, reference
from kernels.trial import Prepared, Setting, Trial

_ROWS: tuple[tuple[float, int, float, float], ...] = (
    (0.0, 0, 1.0, 0.0),
    (0.8, 0, 1.0, 0.0),
    (1.0, 20, 1.0, 0.0),
    (0.7, 0, 0.9, 0.0),
    (1.3, 50, 0.8, 0.01),
)
"""Temperature, top_k, top_p and min_p, row after row over and over."""


def prepare(
    setting: Setting,
    *,
    rows: int,
    vocab: int,
    has_mask: bool = True,
    chunk: int = 8192,
    broken: int | None = None,
) -> Prepared:
    """Rows with all kinds of filters; the row ``broken`` holds a NaN."""
    logits = setting.normal(rows, vocab, scale=3.0)
    if broken is not None and setting.device == "cpu":
        logits[broken, vocab // 2] = torch.nan
    mask = setting.integers(-(2**31), 2**31, rows, -(-vocab // 32)) if has_mask else None
    if broken == 1 and mask is not None and setting.device == "cpu":
        mask[0] = 0
    columns = [list(column) for column in zip(*(_ROWS[row % len(_ROWS)] for row in range(rows)), strict=True)]
    temperatures, top_ps, min_ps = (setting.numbers(columns[place], torch.float32) for place in (0, 2, 3))
    top_ks = setting.numbers([int(count) for count in columns[1]])
    arguments = (logits, temperatures, setting.uniform(rows), mask, top_ks, top_ps, min_ps,
                 GREEDY_BELOW_TEMPERATURE)  # fmt: skip
    return Prepared(
        lambda launch: (kernel.sample(*arguments, chunk=chunk, launch=launch),),
        lambda: (reference.sample(*arguments),),
        logits.nbytes + (mask.nbytes if mask is not None else 0),
        8 * rows * vocab,
    )


_FLOAT = (torch.float32,)
SMALL = (
    Trial("sample", "5 x 1000, grammar", partial(prepare, rows=5, vocab=1000), _FLOAT),
    Trial("sample", "2 x 300, chunks", partial(prepare, rows=2, vocab=300, has_mask=False, chunk=128)),
    Trial("sample", "nothing to draw", partial(prepare, rows=3, vocab=100, broken=1), _FLOAT),
)
REAL = (Trial("sample", "64 x 163840, grammar", partial(prepare, rows=64, vocab=163840)),)
