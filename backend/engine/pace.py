"""How much prefill fits beside decodes without making their readers wait.

Prefill is what makes steps long, and a step that is long keeps everyone who decodes waiting for a token (and
everyone who left, for its blocks to be freed). So prefill chunks beside decodes are cut to what the machine
has lately computed in the time aimed for. Alone, prefill takes the whole budget: nobody waits, and large
chunks are faster.
"""

from __future__ import annotations

MIN_PREFILL_TOKENS = 16
"""Prefill always goes on by at least this much."""

_WEIGHT_OF_LATEST = 0.3


class PrefillPace:
    """Turns step times into an allowance of prefill tokens. Knows no clock; it is told how long steps
    took."""

    def __init__(self, max_mixed_step_s: float) -> None:
        self._max_step_s = max_mixed_step_s
        self._token_s: float | None = None

    def observe(self, num_tokens: int, step_s: float) -> None:
        """Take in a step of ``num_tokens``. Small ones say little of what prefill costs, and are left out."""
        if num_tokens < MIN_PREFILL_TOKENS:
            return
        latest_s = step_s / num_tokens
        if self._token_s is None:
            self._token_s = latest_s
        else:
            self._token_s += _WEIGHT_OF_LATEST * (latest_s - self._token_s)

    def allowance(self) -> int | None:
        """Prefill tokens that a step with decodes should have at most; None for no limit."""
        if self._max_step_s <= 0 or not self._token_s:
            return None
        fitting = int(self._max_step_s / self._token_s)
        return max(MIN_PREFILL_TOKENS, fitting // MIN_PREFILL_TOKENS * MIN_PREFILL_TOKENS)
