"""What stands around a prompt's words, found through the API's own figures.

``prompt_tokens`` says that each word is one token and how many more the template adds. How many of those
come *before* the words decides where blocks of the engine begin. ``cached_tokens`` says it: of two texts that
have k words in common, the second finds ``floor((prefix + k) / block) * block`` tokens cached; at the k where
that jumps, ``prefix + k`` is the figure itself.
"""

from __future__ import annotations

import random
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass

from loadtest.replay.words import FIRST, WORDS

_REACH = 320
"""Words within which a block must end: larger blocks than that are not found."""
_GROUP = 8

Probe = Callable[[str], Awaitable[tuple[int, int]]]
"""text -> (prompt tokens, cached tokens) of a chat whose one message is the text."""


class CalibrationError(RuntimeError):
    """The API's figures do not let themselves be explained; the message says which."""


@dataclass(frozen=True)
class Calibration:
    """``prefix_tokens`` stand before the words of a prompt (the first word included), ``suffix_tokens``
    behind them. ``block_tokens`` of the engine; 0 where nothing is ever cached.
    """

    prefix_tokens: int
    suffix_tokens: int
    block_tokens: int
    words: tuple[str, ...]


def text_of(words: Sequence[str]) -> str:
    """A message's text."""
    return " ".join((FIRST, *words))


async def calibrate(probe: Probe, seed: int) -> Calibration:
    """Measure with some twenty-five short requests, all of which must reach the same replica.

    Args:
        seed: of the text; one that was used lately finds its own blocks cached.

    Raises:
        CalibrationError: too few words are single tokens, or cached tokens do not come in blocks.
    """
    around, _ = await probe(text_of([]))
    words = await _single_tokens(probe, around)
    rng = random.Random(seed)
    known = [rng.choice(words) for _ in range(_REACH)]
    tokens, _ = await probe(text_of(known))
    if tokens != around + _REACH:
        raise CalibrationError(f"{_REACH} words are {tokens - around} tokens, though each is one by itself")

    async def cached(num_shared: int) -> int:
        """Cached tokens of a text that leaves the known one after so many words."""
        other = rng.choice([word for word in words if word != known[num_shared]])
        return (await probe(text_of([*known[:num_shared], other])))[1]

    low, high = 0, _REACH - 1
    least, most = await cached(low), await cached(high)
    if most == least:
        return Calibration(around, 0, 0, tuple(words))
    while high - low > 1:
        middle = (low + high) // 2
        if await cached(middle) > least:
            high = middle
        else:
            low = middle
    at_jump = await cached(high)
    block, prefix = at_jump - least, at_jump - high
    await _check(cached, high, at_jump, block)
    if not 0 < prefix <= around:
        raise CalibrationError(f"{prefix} tokens before the words cannot be: there are {around} around them")
    return Calibration(prefix, around - prefix, block, tuple(words))


async def _single_tokens(probe: Probe, around: int) -> list[str]:
    found: list[str] = []
    for start in range(0, len(WORDS), _GROUP):
        group = WORDS[start : start + _GROUP]
        tokens, _ = await probe(text_of(group))
        if tokens == around + len(group):
            found += group
    if len(found) < len(WORDS) // 4:
        raise CalibrationError(f"only {len(found)} of {len(WORDS)} words are single tokens for this model")
    return found


async def _check(cached: Callable[[int], Awaitable[int]], jump: int, at_jump: int, block: int) -> None:
    """The next block must end exactly one block further on."""
    if jump + block >= _REACH:
        return
    before, behind = await cached(jump + block - 1), await cached(jump + block)
    if (before, behind) != (at_jump, at_jump + block):
        raise CalibrationError(
            f"cached tokens do not come in blocks of {block}: {at_jump} with {jump} words in common, "
            f"{before} with {jump + block - 1}, {behind} with {jump + block}; is the cache under pressure?"
        )
