"""Text whose white space is only kept where something stands behind, or before it."""

from __future__ import annotations


class RightTrimmed:
    """A text without the white space at its end, given out as it grows."""

    __slots__ = ("_held",)

    def __init__(self) -> None:
        self._held = ""

    def push(self, text: str) -> str:
        """Take more; returns all but the white space at the end, which waits for what follows."""
        text = self._held + text
        shown = text.rstrip()
        self._held = text[len(shown) :]
        return shown

    def end(self) -> None:
        """The text is over: what waits is dropped."""
        self._held = ""


class NotBlank:
    """A text that is dropped when it is nothing but white space, given out as it grows."""

    __slots__ = ("_held", "_is_shown")

    def __init__(self) -> None:
        self._held = ""
        self._is_shown = False

    def push(self, text: str) -> str:
        """Take more; returns it, with what waited, unless all of it is white space so far."""
        if self._is_shown:
            return text
        text = self._held + text
        if not text or text.isspace():
            self._held = text
            return ""
        self._held = ""
        self._is_shown = True
        return text

    def end(self) -> str:
        """The text is over, another begins; returns what waited, for whom white space is an answer too."""
        held, self._held = self._held, ""
        self._is_shown = False
        return held
