"""What arrives, and what became of it."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol


@dataclass(slots=True, eq=False)
class SimulatedRequest:
    """One request on its way through the fleet.

    ``key`` is the affinity key within ``account``. ``digests`` name the full blocks of the prompt, and as far
    as later requests repeat it of the answer, each standing for its block and all before it.
    ``is_opening``: it follows from no answer. What comes after it is filled in by the run; times in seconds.
    ``cached_tokens`` counts at the first admission that led to an answer.
    """

    index: int
    arrival_s: float
    account: str
    key: str
    digests: Sequence[bytes]
    prompt_tokens: int
    output_tokens: int
    is_opening: bool = True
    replica_id: str = ""
    num_attempts: int = 0
    cached_tokens: int = 0
    first_token_s: float | None = None
    finished_s: float | None = None

    @property
    def first_block(self) -> str:
        """A name for the first block; a prompt shorter than one has a name of its own."""
        return self.digests[0].hex() if self.digests else f"short-{self.index}"

    @property
    def num_tokens(self) -> int:
        return self.prompt_tokens + self.output_tokens


class Workload(Protocol):
    """A source of requests in order of their arrival."""

    @property
    def block_tokens(self) -> int:
        """Tokens of a block that a digest names."""
        ...

    def next_arrival(self) -> SimulatedRequest | None:
        """The next request that does not depend on an answer; None when there are no more."""
        ...

    def next_turn(self, answered: SimulatedRequest, now_s: float) -> SimulatedRequest | None:
        """The request that follows an answer, arriving at ``now_s`` or later; None when none does."""
        ...
