"""Turns entries of a trace into prompts that share what the entries share, and says what could be cached."""

from __future__ import annotations

import random
from collections.abc import Hashable, Sequence
from dataclasses import dataclass
from functools import lru_cache

from loadtest.replay.calibration import Calibration, text_of
from loadtest.replay.trace import TraceEntry


@dataclass(frozen=True)
class Prompt:
    """What is sent for an entry. ``num_tokens`` is what the API must count; ``keys`` name the engine's full
    blocks that can be cached, each standing for its block and all before it.
    """

    entry: TraceEntry
    text: str
    num_tokens: int
    max_tokens: int
    keys: tuple[Hashable, ...]


class PromptMaker:
    """Writes prompts in which an id of the trace stands for ``block_tokens`` tokens.

    Position p of a prompt belongs to the id of block ``p // block_tokens``; the words of the positions that
    the template takes are left out, and its end comes on top of the entry's length. So ids in common are
    tokens in common, at the same positions, and no others are.

    Args:
        calibration: of the model that is asked.
        source_block_tokens: what an id stands for in the trace.
        block_tokens: what it stands for in the prompts; lengths shrink in the same proportion.
        seed: of the words; another seed finds nothing of an earlier run cached.
    """

    def __init__(
        self, calibration: Calibration, source_block_tokens: int, block_tokens: int, seed: int
    ) -> None:
        self._calibration = calibration
        self._source_block_tokens = source_block_tokens
        self._block_tokens = block_tokens
        self._words_of = lru_cache(maxsize=65_536)(self._draw)
        self._seed = seed

    def prompt(self, entry: TraceEntry) -> Prompt:
        """An entry at this scale."""
        calibration, block = self._calibration, self._block_tokens
        num_full, rest = divmod(entry.input_length, self._source_block_tokens)
        ratio = block / self._source_block_tokens
        length = num_full * block + min(round(rest * ratio), block - 1)
        length = max(length, calibration.prefix_tokens)
        words = [word for hash_id in entry.hash_ids for word in self._words_of(hash_id)]
        num_tokens = length + calibration.suffix_tokens
        return Prompt(
            entry,
            text_of(words[calibration.prefix_tokens : length]),
            num_tokens,
            max(1, round(entry.output_length * ratio)),
            self._keys(entry, length, num_tokens),
        )

    def _draw(self, hash_id: int) -> Sequence[str]:
        rng = random.Random(f"{self._seed}:{hash_id}")
        return rng.choices(self._calibration.words, k=self._block_tokens)

    def _keys(self, entry: TraceEntry, length: int, num_tokens: int) -> tuple[Hashable, ...]:
        """At least one token of a prompt is always computed, so a last block that is full is not cached."""
        size = self._calibration.block_tokens
        if not size:
            return ()
        keys: list[Hashable] = []
        for index in range((num_tokens - 1) // size):
            end = (index + 1) * size
            if end <= self._calibration.prefix_tokens:
                keys.append(("template", index))
            elif end <= length:
                keys.append((entry.hash_ids[(end - 1) // self._block_tokens], index))
            elif length <= self._calibration.prefix_tokens:
                keys.append(("no words", index))
            else:
                keys.append((entry.hash_ids[(length - 1) // self._block_tokens], index, length))
        return tuple(keys)


def ideal_cached_tokens(prompts: Sequence[Prompt], block_tokens: int) -> int:
    """What one cache without end would hold of each prompt when it arrives, all in all."""
    seen: set[Hashable] = set()
    total = 0
    for prompt in prompts:
        for key in prompt.keys:
            if key not in seen:
                break
            total += block_tokens
        seen.update(prompt.keys)
    return total
