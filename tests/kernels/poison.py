"""Inputs that stand in NaN: a read past their end spoils the result."""

from __future__ import annotations

import torch
from torch import Tensor


def surrounded(x: Tensor) -> Tensor:
    """A contiguous copy of ``x`` (float) with NaN before and behind it, off any alignment."""
    margin = 67
    buffer = torch.full((x.numel() + 2 * margin,), torch.nan)
    buffer[margin : margin + x.numel()] = x.flatten()
    return buffer[margin : margin + x.numel()].view(x.shape)


def assert_close(actual: Tensor, expected: Tensor, *, rtol: float = 2e-5, atol: float = 2e-5) -> None:
    """NaN positions first (so that the message says so), then values."""
    assert actual.shape == expected.shape
    assert torch.equal(actual.isnan(), expected.isnan()), "NaN at other positions"
    torch.testing.assert_close(actual, expected, rtol=rtol, atol=atol, equal_nan=True)
