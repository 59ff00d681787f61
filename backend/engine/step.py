"""What one engine step computes: the line between the planner (torch-free) and the model runner."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import msgspec

from backend.engine.messages import MediaSpan

ShouldStop = Callable[[], bool]
"""Asked several times during a step; True ends it early."""


class StepInterruptedError(Exception):
    """A step was ended early, as asked: there are no logits, and some of its tokens have no KV."""


class ScheduledChunk(msgspec.Struct, frozen=True):
    """A run of tokens of one sequence to be computed in this step.

    ``token_ids`` are the tokens at positions ``start .. start+len(token_ids)-1``; the KV of everything before
    ``start`` is already in the blocks of ``block_table``, which stays the planner's: it is read during the
    step and not kept; ``block_tags`` say what each block is to hold (:mod:`backend.engine.block_tags`).
    ``needs_logits``: the last token of the chunk is the last known token of the sequence, so a new token is
    sampled from its logits. The last ``num_drafts`` tokens are guesses that follow it, so that the logits of
    the last ``num_drafts + 1`` tokens are wanted. ``media`` are the images that some of its tokens stand for;
    what is remembered of them is remembered for ``cache_salt`` only.
    """

    sequence_id: int
    token_ids: Sequence[int]
    start: int
    block_table: Sequence[int]
    needs_logits: bool
    media: tuple[MediaSpan, ...] = ()
    cache_salt: bytes = b""
    num_drafts: int = 0
    block_tags: Sequence[int] = ()

    @property
    def num_rows(self) -> int:
        """Rows of logits that are wanted."""
        return self.num_drafts + 1 if self.needs_logits else 0

    @property
    def is_decode(self) -> bool:
        """Whether it computes one known token (and perhaps guesses)."""
        return len(self.token_ids) - self.num_drafts == 1


class StepPlan(msgspec.Struct, frozen=True):
    """The chunks of one step; decodes are chunks of one known token."""

    chunks: tuple[ScheduledChunk, ...]

    @property
    def num_tokens(self) -> int:
        return sum(len(chunk.token_ids) for chunk in self.chunks)
