"""What the scheduler may take on, and what it says to what is more than that."""

from __future__ import annotations

from dataclasses import dataclass

from backend.config import SchedulerConfig
from backend.engine.messages import RefusalCode


@dataclass(frozen=True, slots=True)
class SchedulerLimits:
    """Budgets; lengths and budgets in tokens.

    ``max_waiting`` sequences may be known beyond the ``max_running`` that fit in the batch. The images of
    all known sequences may have ``max_media_bytes`` together.

    Raises:
        ValueError: naming the limit that cannot work.
    """

    block_size: int
    max_model_len: int
    max_tokens_per_step: int
    max_running: int
    max_waiting: int
    max_media_bytes: int = 1 << 30

    @classmethod
    def of(cls, block_size: int, max_model_len: int, config: SchedulerConfig) -> SchedulerLimits:
        """As configured."""
        return cls(
            block_size=block_size,
            max_model_len=max_model_len,
            max_tokens_per_step=config.max_tokens_per_step,
            max_running=config.max_running,
            max_waiting=config.max_waiting,
            max_media_bytes=config.max_media_bytes,
        )

    def __post_init__(self) -> None:
        for name in ("block_size", "max_model_len", "max_tokens_per_step", "max_running"):
            if getattr(self, name) < 1:
                raise ValueError(f"{name}: must be at least 1, not {getattr(self, name)}")
        if self.max_waiting < 0:
            raise ValueError(f"max_waiting: must not be negative, but is {self.max_waiting}")
        if self.max_tokens_per_step < self.max_running:
            raise ValueError(
                f"max_tokens_per_step: {self.max_tokens_per_step} is less than max_running "
                f"({self.max_running}), so that a full batch could not decode"
            )


class RefusedError(Exception):
    """A sequence cannot be queued; ``code`` is for programs, the message for people."""

    def __init__(self, code: RefusalCode, message: str) -> None:
        super().__init__(message)
        self.code = code
        self.message = message
