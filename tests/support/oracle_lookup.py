"""Guesses that are right as often as wanted, for tests of what becomes of guesses."""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence

from backend.engine.sequence import Sequence as EngineSequence
from backend.engine.speculation import PromptLookup


class OracleLookup(PromptLookup):
    """Knows what each sequence will say, and tells it with mistakes.

    Args:
        truth: what a sequence generates in all.
        rng: of the mistakes and of the lengths.
        wrong_share: of the guessed tokens.
    """

    def __init__(
        self,
        truth: Callable[[EngineSequence], Sequence[int]],
        rng: random.Random,
        *,
        max_draft_tokens: int = 6,
        wrong_share: float = 0.2,
    ) -> None:
        super().__init__(max_draft_tokens, 1)
        self._truth, self._rng, self._wrong_share = truth, rng, wrong_share
        self._longest = max_draft_tokens

    def propose(self, sequence: EngineSequence, room: int) -> list[int]:
        said = sequence.num_generated_tokens
        length = min(self._rng.randint(0, self._longest), room)
        if length <= 0:
            return []
        draft = list(self._truth(sequence)[said : said + length])
        # Beyond the end of the truth and by mistake: any token at all.
        draft += [self._rng.randrange(50) for _ in range(length - len(draft))]
        return [self._rng.randrange(50) if self._rng.random() < self._wrong_share else t for t in draft]

    def observe(self, sequence: EngineSequence, num_proposed: int, num_right: int) -> None:
        assert 0 <= num_right <= num_proposed
