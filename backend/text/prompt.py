"""What a model family has to bring for its text: the line between the HTTP side and the families."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

from backend.engine.messages import MediaSpan
from backend.text.answer_rules import CallMarks
from backend.text.parts import OutputForm


@dataclass(frozen=True, slots=True)
class Conversation:
    """What a request says that decides its prompt, and how answers to it are read.

    ``options`` are the request's ``chat_template_kwargs`` with its ``reasoning_effort`` among them;
    ``thinking`` is the request's own setting in the form of the vendor's API. ``tools`` are those that may be
    called. ``cache_salt`` is the scope of what is remembered of it.
    """

    messages: Sequence[Mapping[str, Any]]
    tools: Sequence[Mapping[str, Any]] = ()
    options: Mapping[str, Any] = field(default_factory=dict)
    thinking: Any = None
    allows_parallel_calls: bool = True
    cache_salt: str = ""


@dataclass(frozen=True, slots=True)
class Prompt:
    """A prompt's tokens; ``form`` None means that answers are plain text.

    ``reasoning_end`` is the token that ends the reasoning in which the answer begins, None when it begins
    with its content.
    """

    token_ids: list[int]
    form: OutputForm | None = None
    reasoning_end: int | None = None
    media: tuple[MediaSpan, ...] = field(default=(), kw_only=True)


class ModelText(Protocol):
    """The text side of one model. Safe to use from several threads."""

    @property
    def token_bytes(self) -> Sequence[bytes]:
        """Bytes that each token id adds to a text, indexed by id."""
        ...

    @property
    def stop_token_ids(self) -> tuple[int, ...]:
        """Tokens that end an answer, besides those that the model's configuration names."""
        ...

    @property
    def special_token_ids(self) -> frozenset[int]:
        """Tokens that are never part of a text."""
        ...

    @property
    def can_call_tools(self) -> bool: ...

    @property
    def call_marks(self) -> CallMarks | None:
        """The tokens around tool calls; None for a model that makes none."""
        ...

    def encode_text(self, text: str) -> list[int]:
        """Encode text as ordinary tokens."""
        ...

    def encode(self, conversation: Conversation) -> Prompt:
        """Render and encode a conversation.

        Raises:
            BadMessageError: naming the field that cannot be rendered.
        """
        ...
