"""Text whose white space is only kept where something stands behind, or before it.

Every text costs the same whatever was held back before it, because models do run on in blanks.
"""

from __future__ import annotations


class RightTrimmed:
    """A text without the white space at its end, given out as it grows."""

    __slots__ = ("_held",)

    def __init__(self) -> None:
        self._held: list[str] = []

    def push(self, text: str) -> str:
        """Take more; returns all but the white space at the end, which waits for what follows."""
        shown = text.rstrip()
        if not shown:
            self._held.append(text)
            return ""
        before = "".join(self._held)
        self._held = [text[len(shown) :]]
        return before + shown

    def end(self) -> None:
        """The text is over: what waits is dropped."""
        self._held.clear()


class NotBlank:
    """A text that is dropped when it is nothing but white space, given out as it grows."""

    __slots__ = ("_held", "_is_shown")

    def __init__(self) -> None:
        self._held: list[str] = []
        self._is_shown = False

    def push(self, text: str) -> str:
        """Take more; returns it, with what waited, unless all of it is white space so far."""
        if self._is_shown:
            return text
        self._held.append(text)
        if not text.strip():
            return ""
        self._is_shown = True
        return self._take()

    def end(self) -> str:
        """The text is over, another begins; returns what waited, for whom white space is an answer too."""
        self._is_shown = False
        return self._take()

    def _take(self) -> str:
        held = "".join(self._held)
        self._held.clear()
        return held
