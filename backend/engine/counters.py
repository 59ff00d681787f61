"""What a scheduler has counted since its start."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(slots=True)
class SchedulerCounters:
    """Prompts count at first admission; computed tokens every time."""

    num_prompt_tokens: int = 0
    num_cached_prompt_tokens: int = 0
    num_completion_tokens: int = 0
    num_computed_tokens: int = 0
    num_preemptions: int = 0
    num_draft_tokens: int = 0
    num_right_draft_tokens: int = 0
