"""What the links of one replica have done."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, field
from typing import Literal

Failure = Literal["unreachable", "refused", "stalled", "lost", "corrupt", "no_room"]


@dataclass(slots=True)
class TransferCounters:
    """Since the start. ``failures`` ended a transfer early; the rest of its prompt was computed here."""

    num_started_in: int = 0
    num_completed_in: int = 0
    num_started_out: int = 0
    num_completed_out: int = 0
    num_blocks_in: int = 0
    num_blocks_out: int = 0
    num_bytes_in: int = 0
    num_bytes_out: int = 0
    failures: Counter[str] = field(default_factory=Counter)

    def count_failure(self, failure: Failure) -> None:
        self.failures[failure] += 1
