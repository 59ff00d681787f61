"""A machine that several replicas compute on, and slow each other down."""

from __future__ import annotations


class Host:
    """Counts who computes. ``slowdown`` is how much longer a step takes beside one other that computes: 1
    where they share nothing. Who computes is looked at when a step begins, for the whole step.
    """

    def __init__(self, slowdown: float = 1.0) -> None:
        if slowdown < 1.0:
            raise ValueError(f"slowdown: must be at least 1, not {slowdown}")
        self._excess = slowdown - 1.0
        self._num_computing = 0

    def begin(self) -> float:
        """One more computes; what its step takes beside the others, as a factor."""
        factor = 1.0 + self._excess * self._num_computing
        self._num_computing += 1
        return factor

    def end(self) -> None:
        """One fewer computes."""
        self._num_computing -= 1
