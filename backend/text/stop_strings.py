"""Stop strings: found wherever tokens were cut, and never shown, not even in part.

A text is read character by character by one small automaton per stop string (Knuth, Morris and Pratt),
whose state is the length of the longest suffix of the text that begins the stop string. The longest of the
states is what has to be held back; a state that reaches the whole length is the match. So what is released
depends on the text alone and not on how it arrived: a stream and a whole answer end at the same character.
"""

from __future__ import annotations

from collections.abc import Sequence


class StopStrings:
    """The compiled stop strings of one request; shared by its choices, holds no state of a text.

    Args:
        stops: not empty strings.
    """

    __slots__ = ("failures", "first_characters", "stops")

    def __init__(self, stops: Sequence[str]) -> None:
        self.stops = tuple(dict.fromkeys(stops))
        self.failures = tuple(_failure_table(stop) for stop in self.stops)
        self.first_characters = frozenset(stop[0] for stop in self.stops)


class StopFilter:
    """What of one text may be shown.

    ``matched`` is the stop string that ended the text, or None. After a match nothing more is released.
    """

    __slots__ = ("_held", "_states", "_stops", "matched")

    def __init__(self, stops: StopStrings) -> None:
        self._stops = stops
        self._states = [0] * len(stops.stops)
        self._held = ""
        self.matched: str | None = None

    def push(self, text: str) -> str:
        """Take the next characters; return those that can no longer be part of a stop string."""
        if self.matched is not None:
            return ""
        if not self._held and self._stops.first_characters.isdisjoint(text):
            return text
        for position, character in enumerate(text, start=1):
            matched = self._advance(character)
            if matched is not None:
                self.matched = matched
                seen = self._held + text[:position]
                self._held = ""
                return seen[: -len(matched)]
        seen = self._held + text
        num_held = max(self._states)
        cut = len(seen) - num_held
        self._held = seen[cut:]
        return seen[:cut]

    def flush(self) -> str:
        """End the text: what was held back turned out to be no stop string."""
        held, self._held = self._held, ""
        return held

    def _advance(self, character: str) -> str | None:
        """Move every automaton by one character; of the stops that end here return the longest."""
        states = self._states
        longest: str | None = None
        for index, stop in enumerate(self._stops.stops):
            failure = self._stops.failures[index]
            state = states[index]
            while state and stop[state] != character:
                state = failure[state - 1]
            if stop[state] == character:
                state += 1
            states[index] = state
            if state == len(stop) and (longest is None or len(stop) > len(longest)):
                longest = stop
        return longest


def _failure_table(stop: str) -> tuple[int, ...]:
    """For each prefix the length of its longest proper suffix that is also a prefix."""
    table = [0] * len(stop)
    state = 0
    for index in range(1, len(stop)):
        while state and stop[state] != stop[index]:
            state = table[state - 1]
        if stop[state] == stop[index]:
            state += 1
        table[index] = state
    return tuple(table)
