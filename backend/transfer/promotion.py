"""Whether blocks of a tier are loaded or computed again: what has been measured decides.

Domain: loading costs bytes over the bandwidth that loads of that tier lately had, with everything on the way;
computing costs tokens times what a token of a prompt lately took. Both follow the machine: a slow disk, or a
small model on a fast device, turns the answer round.

Before both have been measured the answer is to load, which measures it. While the answer is no, one in
``PROBE_EVERY`` is loaded all the same, so that a disk that was slow once is not given up for ever.
"""

from __future__ import annotations

from typing import Literal

Tier = Literal["host", "disk"]

PROBE_EVERY = 16
_WEIGHT_OF_LATEST = 0.2


class PromotionRule:
    """Knows no clock: it is told what things took."""

    def __init__(self) -> None:
        self._byte_s: dict[Tier, float] = {}
        self._token_s: float | None = None
        self._num_refused = 0

    def observe_load(self, tier: Tier, num_bytes: int, seconds: float) -> None:
        """``num_bytes`` came from a tier into the KV cache within ``seconds``."""
        if num_bytes:
            self._byte_s[tier] = _smoothed(self._byte_s.get(tier), seconds / num_bytes)

    def observe_prefill(self, num_tokens: int, seconds: float) -> None:
        """``num_tokens`` of prompts were computed within ``seconds``."""
        if num_tokens:
            self._token_s = _smoothed(self._token_s, seconds / num_tokens)

    def load_s(self, num_bytes: dict[Tier, int]) -> float:
        """Estimated seconds to load so much; 0 for what was never measured."""
        return sum(count * self._byte_s.get(tier, 0.0) for tier, count in num_bytes.items())

    def compute_s(self, num_tokens: int) -> float | None:
        """Estimated seconds to compute so many tokens; None before any was measured."""
        return None if self._token_s is None else num_tokens * self._token_s

    def is_worth(self, num_bytes: dict[Tier, int], num_tokens: int) -> bool:
        """Whether to load ``num_bytes`` of each tier instead of computing the ``num_tokens`` in them."""
        computing_s = self.compute_s(num_tokens)
        if computing_s is None or self.load_s(num_bytes) < computing_s:
            return True
        self._num_refused += 1
        return self._num_refused % PROBE_EVERY == 0


def _smoothed(known: float | None, latest: float) -> float:
    return latest if known is None else known + _WEIGHT_OF_LATEST * (latest - known)
