"""From logits to one token a row, without a sort and without the host."""

from __future__ import annotations

from torch import Tensor

from kernels.dispatch import takes_triton
from kernels.sample import reference

GREEDY_BELOW_TEMPERATURE = 1e-5
"""Temperatures below this take the likeliest token."""


def sample(
    logits: Tensor,
    temperatures: Tensor,
    draws: Tensor,
    *,
    bitmask: Tensor | None,
    top_ks: Tensor,
    top_ps: Tensor,
    min_ps: Tensor,
) -> Tensor:
    """Draw a token for each row by inverting its cumulative distribution, in the order of the vocabulary.

    Tokens that ``bitmask`` does not allow are out. Then ``min_p`` leaves the tokens of at least so much of
    the likeliest one's probability, ``top_k`` the likeliest of them, ``top_p`` the fewest of what is left
    that hold so much of it. Tokens that tie with the last one left stay too.

    Args:
        logits: ``[rows, vocab]``, any float type; columns contiguous.
        temperatures: ``[rows]`` float32; below :data:`GREEDY_BELOW_TEMPERATURE` the likeliest token is taken,
            among equals the lowest.
        draws: ``[rows]`` float32 in [0, 1).
        bitmask: ``[rows, ceil(vocab / 32)]`` int32: bit ``t % 32`` of word ``t // 32`` allows token ``t``;
            None allows all.
        top_ks: ``[rows]`` int32, 0 for no limit.
        top_ps: ``[rows]`` float32, 1 for no limit.
        min_ps: ``[rows]`` float32, 0 for no limit.

    Returns:
        ``[rows]`` int32; -1 where nothing can be drawn (a NaN, an infinite logit, or nothing allowed).

    Raises:
        ValueError: when the mask is too narrow.
    """
    if bitmask is not None and bitmask.shape != (logits.shape[0], -(-logits.shape[1] // 32)):
        raise ValueError(f"bitmask {list(bitmask.shape)} does not fit logits {list(logits.shape)}")
    arguments = (logits, temperatures, draws, bitmask, top_ks, top_ps, min_ps, GREEDY_BELOW_TEMPERATURE)
    if takes_triton("sample", logits):
        from kernels.sample import kernel

        return kernel.sample(*arguments)
    return reference.sample(*arguments)
