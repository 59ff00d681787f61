"""How much prefill fits into a step without making people wait too long.

Prefill is what makes steps long. While one runs, everyone who decodes waits for a token, and everyone who
arrives waits to be looked at. So what a step may prefill is what the machine has lately computed in the time
aimed for:

* beside decodes, ``max_mixed_step_s`` less what the decodes take themselves; but at least as long as they
  take, or on a slow machine with many readers new prompts would hardly get on; and more when more are waiting
  for their first token than for their next one;
* alone, ``LONE_STEPS`` times as long, because larger chunks are faster.
"""

from __future__ import annotations

MIN_PREFILL_TOKENS = 16
"""Prefill always goes on by at least this much."""

LONE_STEPS = 5
"""A step that does not decode may take as long as so many that do."""

MAX_CROWD = 2.0
"""How much longer a step may get, at most, because of those who wait for their first token."""

_WEIGHT_OF_LATEST = 0.3


class PrefillPace:
    """Turns step times into an allowance of prefill tokens. Knows no clock: it is told what steps took."""

    def __init__(self, max_mixed_step_s: float) -> None:
        self._max_step_s = max_mixed_step_s
        self._token_s: float | None = None
        self._decode_step_s = 0.0

    def observe(self, num_decodes: int, num_prefill_tokens: int, step_s: float) -> None:
        """Take in what a step computed. Small bits of prefill say little of what it costs."""
        if num_prefill_tokens == 0:
            self._decode_step_s = _smoothed(self._decode_step_s, step_s)
        elif num_prefill_tokens >= MIN_PREFILL_TOKENS:
            decode_s = min(self._decode_step_s, step_s / 2) if num_decodes else 0.0
            self._token_s = _smoothed(self._token_s, (step_s - decode_s) / num_prefill_tokens)

    def allowance(self, num_decodes: int, num_prefills: int) -> int | None:
        """Prefill tokens that the next step should have at most; None for no limit.

        Args:
            num_decodes: sequences that wait for their next token.
            num_prefills: sequences that wait for their first one.
        """
        if self._max_step_s <= 0 or not self._token_s:
            return None
        if num_decodes:
            crowd = min(max(num_prefills / num_decodes, 1.0), MAX_CROWD)
            prefill_s = max(self._max_step_s * crowd - self._decode_step_s, self._decode_step_s * crowd)
        else:
            prefill_s = self._max_step_s * LONE_STEPS
        fitting = int(prefill_s / self._token_s)
        return max(MIN_PREFILL_TOKENS, fitting // MIN_PREFILL_TOKENS * MIN_PREFILL_TOKENS)


def _smoothed(known: float | None, latest: float) -> float:
    return known + _WEIGHT_OF_LATEST * (latest - known) if known else latest
