"""What an answer consists of, in the order in which the model said it.

A parser turns a model's own marks into parts; the HTTP side turns parts into deltas or joins them into a
message. Joined, the parts of an answer are the same however its tokens were delivered.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Literal, Protocol

import msgspec

from backend.engine.messages import SequenceFinish

CallProblem = Literal["invalid_arguments", "incomplete", "unknown_tool", "tool_not_allowed"]


class ReasoningText(msgspec.Struct, frozen=True):
    """More of what the model thought before it answered."""

    text: str


class ContentText(msgspec.Struct, frozen=True):
    """More of the answer itself."""

    text: str


class CallBegun(msgspec.Struct, frozen=True):
    """A tool call: the ``index``-th of this answer, counted from 0."""

    index: int
    id: str
    name: str


class CallArguments(msgspec.Struct, frozen=True):
    """More of a call's arguments: JSON text."""

    index: int
    text: str


class CallFailed(msgspec.Struct, frozen=True):
    """Something that was meant as a call and is no good one.

    ``index`` names the call whose arguments cannot be used; None means that no call could be made of it, and
    ``said_id`` and ``said_arguments`` are then all that the model said.
    """

    index: int | None
    code: CallProblem
    message: str
    said_id: str = ""
    said_arguments: str = ""


Part = ReasoningText | ContentText | CallBegun | CallArguments | CallFailed


class OutputParser(Protocol):
    """Reads the tokens of one choice; each choice has its own.

    Attributes:
        num_calls: calls begun so far.
        num_reasoning_tokens: tokens counted so far that were reasoning.
        is_over: whether nothing after this belongs to the answer, so that its sequence can be stopped.
    """

    num_calls: int
    num_reasoning_tokens: int
    is_over: bool

    def is_mark(self, token_id: int) -> bool:
        """Whether a token is one of the model's own marks, which are read whole or not at all."""
        ...

    def count(self, token_id: int) -> None:
        """Take note of a token, once, before its text is fed."""
        ...

    def feed(self, token_id: int, text: str) -> None:
        """Take text of a token, all of it or the next piece."""
        ...

    def finish(self, reason: SequenceFinish) -> None:
        """The text is over."""
        ...

    def take_parts(self) -> list[Part]:
        """What has been found since the last call."""
        ...


class OutputForm(Protocol):
    """How the answers to one request are to be read."""

    def new_parser(self) -> OutputParser: ...


def join_parts(parts: Sequence[Part]) -> list[Part]:
    """Neighbours of the same kind as one."""
    joined: list[Part] = []
    for part in parts:
        last = joined[-1] if joined else None
        if isinstance(part, ReasoningText) and isinstance(last, ReasoningText):
            joined[-1] = ReasoningText(last.text + part.text)
        elif isinstance(part, ContentText) and isinstance(last, ContentText):
            joined[-1] = ContentText(last.text + part.text)
        elif isinstance(part, CallArguments) and isinstance(last, CallArguments) and part.index == last.index:
            joined[-1] = CallArguments(last.index, last.text + part.text)
        else:
            joined.append(part)
    return joined
