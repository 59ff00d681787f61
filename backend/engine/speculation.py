"""Guesses of what a sequence says next, so that one step can confirm several tokens.

Prompt lookup: where the last few tokens have occurred before in the sequence, what followed them then is the
guess. That is right surprisingly often when an answer repeats its prompt, as edits of code do. A guess costs
a row of a step and changes no answer: the model's own choice is made at every position, and guesses are kept
only as far as they are that choice (:mod:`backend.engine.engine`).

How many tokens are guessed adapts to each sequence: more after guesses that were right, fewer after wrong
ones, and none for a while after several misses, so that prose pays next to nothing.

Pure: no tensors, no clock. Time: O(1) for each token of a sequence, once.
"""

from __future__ import annotations

from dataclasses import dataclass, field

from backend.engine.sequence import Sequence

FIRST_DRAFT_TOKENS = 4
"""Guessed when nothing is known of a sequence yet."""

FIRST_PAUSE_TOKENS = 4
MAX_PAUSE_TOKENS = 128
"""Tokens without a guess after a miss; doubled with each miss in a row."""


@dataclass(slots=True)
class _History:
    """Where each run of tokens last ended, and how guesses have fared."""

    limit: int
    ends: dict[int, int] = field(default_factory=dict)
    num_indexed: int = 0
    pause: int = 0
    resumes_at: int = 0


class PromptLookup:
    """Guesses for all sequences of an engine; forgets one when told to.

    Args:
        max_draft_tokens: guessed at a time, at most.
        match_tokens: that must have occurred before.

    Raises:
        ValueError: naming the setting that cannot work.
    """

    def __init__(self, max_draft_tokens: int, match_tokens: int) -> None:
        for name, value in (("max_draft_tokens", max_draft_tokens), ("match_tokens", match_tokens)):
            if value < 1:
                raise ValueError(f"speculation.{name}: must be at least 1, not {value}")
        self._max_draft_tokens = max_draft_tokens
        self._match_tokens = match_tokens
        self._histories: dict[int, _History] = {}

    @property
    def num_remembered(self) -> int:
        return len(self._histories)

    def propose(self, sequence: Sequence, room: int) -> list[int]:
        """What may follow the sequence's known tokens: at most ``room`` of them, often none."""
        history = self._histories.get(sequence.sequence_id)
        if history is None:
            limit = min(FIRST_DRAFT_TOKENS, self._max_draft_tokens)
            history = self._histories[sequence.sequence_id] = _History(limit)
        if room < 1 or sequence.num_tokens < history.resumes_at:
            return []
        found = self._look_up(history, sequence.token_ids)
        if found is None:
            return []
        known = sequence.token_ids
        draft: list[int] = []
        for at in range(found, found + min(room, history.limit)):
            draft.append(known[at] if at < len(known) else draft[at - len(known)])
        return draft

    def observe(self, sequence: Sequence, num_proposed: int, num_right: int) -> None:
        """Learn how a guess fared."""
        history = self._histories.get(sequence.sequence_id)
        if history is None or num_proposed == 0:
            return
        if num_right == num_proposed:
            history.limit = min(history.limit * 2, self._max_draft_tokens)
        else:
            history.limit = max(num_right, 1)
        if num_right:
            history.pause = 0
        else:
            history.pause = min(max(history.pause * 2, FIRST_PAUSE_TOKENS), MAX_PAUSE_TOKENS)
            history.resumes_at = sequence.num_tokens + history.pause

    def forget(self, sequence_id: int) -> None:
        """Drop what is known of a sequence; nothing when that is nothing."""
        self._histories.pop(sequence_id, None)

    def _look_up(self, history: _History, known: list[int]) -> int | None:
        """The index behind the last earlier occurrence of the sequence's last tokens."""
        size, ends = self._match_tokens, history.ends
        # Hashes of runs, not the runs: a collision is a wrong guess, no wrong answer.
        for end in range(max(history.num_indexed, size), len(known)):
            ends[hash(tuple(known[end - size : end]))] = end
        history.num_indexed = max(history.num_indexed, len(known))
        return ends.get(hash(tuple(known[-size:]))) if len(known) > size else None
