"""The model's own marks: around reasoning, around tool calls and inside them.

They are tokens of their own, so a mark is told from the same characters in a text by its id; a text that
merely spells one (because a user asked for it) stays text. Only for a vocabulary that lacks a mark's token,
and for spellings that some builds of the model use instead, is the text searched.
"""

from __future__ import annotations

import enum
import re
from collections.abc import Mapping, Sequence
from typing import Final


class Mark(enum.Enum):
    THINK_BEGIN = "<think>"
    THINK_END = "</think>"
    SECTION_BEGIN = "<|tool_calls_section_begin|>"
    SECTION_END = "<|tool_calls_section_end|>"
    CALL_BEGIN = "<|tool_call_begin|>"
    ARGUMENTS_BEGIN = "<|tool_call_argument_begin|>"
    CALL_END = "<|tool_call_end|>"
    # Some builds write the section marks in the singular, as ordinary text. The marks of the calls inside
    # say all that matters, so these are only left out.
    ODD_SECTION_BEGIN = "<|tool_call_section_begin|>"
    ODD_SECTION_END = "<|tool_call_section_end|>"


class Marks:
    """The marks of one vocabulary.

    Args:
        special_tokens: spelling -> id.

    Attributes:
        by_id: the marks that are tokens.
        in_text: the spellings of those that are not.
    """

    def __init__(self, special_tokens: Mapping[str, int]) -> None:
        self.by_id = {special_tokens[mark.value]: mark for mark in Mark if mark.value in special_tokens}
        self.in_text = tuple(mark.value for mark in Mark if mark.value not in special_tokens)


class MarkScanner:
    """Finds marks in the text of one answer, however it was cut.

    What may be the beginning of a mark is held back. Every mark begins with "<" and has no other, so only
    the last "<" of a text can begin an unfinished one.
    """

    def __init__(self, spellings: Sequence[str]) -> None:
        self._spellings = spellings
        self._pattern: Final = re.compile("|".join(map(re.escape, spellings)) if spellings else r"(?!)")
        self._held = ""

    def push(self, text: str) -> list[str | Mark]:
        """Take more text; returns texts (not empty) and marks in their order."""
        if not self._held and "<" not in text:
            return [text] if text else []
        text = self._held + text
        found: list[str | Mark] = []
        end = 0
        for match in self._pattern.finditer(text):
            found += (text[end : match.start()], Mark(match[0]))
            end = match.end()
        cut = self._unfinished(text, end)
        self._held = text[cut:]
        found.append(text[end:cut])
        return [item for item in found if item]

    def flush(self) -> str:
        """The text is over, or a token that is a mark comes: what was held back is text."""
        held, self._held = self._held, ""
        return held

    def _unfinished(self, text: str, start: int) -> int:
        """Where an unfinished mark begins, or the end of the text."""
        begin = text.rfind("<", start)
        if begin >= 0 and any(spelling.startswith(text[begin:]) for spelling in self._spellings):
            return begin
        return len(text)
