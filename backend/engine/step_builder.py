"""A step while it is planned: chunks are added until the token budget is spent."""

from __future__ import annotations

from collections.abc import Collection
from collections.abc import Sequence as ListOf
from dataclasses import dataclass

import msgspec

from backend.engine.sequence import Sequence
from backend.engine.step import ScheduledChunk, StepPlan


@dataclass(frozen=True, slots=True)
class Step:
    """A plan and whom it is for: ``sequences`` are parallel to the chunks, ``rows`` to the chunks that need
    logits."""

    plan: StepPlan
    sequences: tuple[Sequence, ...]
    rows: tuple[Sequence, ...]

    def without(self, indices: Collection[int]) -> Step:
        """The step without some of its chunks."""
        left = [
            (chunk, sequence)
            for index, (chunk, sequence) in enumerate(zip(self.plan.chunks, self.sequences, strict=True))
            if index not in indices
        ]
        return Step(
            StepPlan(tuple(chunk for chunk, _ in left)),
            tuple(sequence for _, sequence in left),
            tuple(sequence for chunk, sequence in left if chunk.needs_logits),
        )


class StepBuilder:
    """Collects chunks until the token budget is spent."""

    __slots__ = ("budget", "chunks", "rows", "sequences")

    def __init__(self, budget: int) -> None:
        self.budget = budget
        self.chunks: list[ScheduledChunk] = []
        self.sequences: list[Sequence] = []
        self.rows: list[Sequence] = []

    def add_decode(self, sequence: Sequence) -> None:
        self._add_chunk(sequence, sequence.num_tokens)
        self.rows.append(sequence)
        self.budget -= 1

    def add_prefill(self, sequence: Sequence, num_tokens: int) -> None:
        """The next so many of the sequence's uncomputed tokens."""
        start = sequence.num_computed_tokens
        end = start + num_tokens
        self._add_chunk(sequence, end)
        if end == sequence.num_tokens:
            self.rows.append(sequence)
        self.budget -= end - start

    def add_drafts(self, index: int, draft: ListOf[int]) -> None:
        """Let guesses follow the one token of a decode that was added before."""
        chunk = self.chunks[index]
        self.chunks[index] = msgspec.structs.replace(
            chunk, token_ids=[*chunk.token_ids, *draft], num_drafts=len(draft)
        )
        self.budget -= len(draft)

    def build(self) -> Step:
        return Step(StepPlan(tuple(self.chunks)), tuple(self.sequences), tuple(self.rows))

    def _add_chunk(self, sequence: Sequence, end: int) -> None:
        start = sequence.num_computed_tokens
        self.chunks.append(
            ScheduledChunk(
                sequence_id=sequence.sequence_id,
                token_ids=sequence.token_ids[start:end],
                start=start,
                block_table=sequence.block_table,
                block_tags=sequence.block_tags,
                needs_logits=end == sequence.num_tokens,
                media=sequence.media_between(start, end),
                cache_salt=sequence.cache_salt,
            )
        )
        self.sequences.append(sequence)
