"""What a request demands of an answer's form, before it is a grammar."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True, slots=True)
class ContentRule:
    """The content must be JSON.

    Args:
        schema: the JSON schema that it must meet.
        param: the request's field that holds the schema, for refusals.
    """

    schema: Any
    param: str


@dataclass(frozen=True, slots=True)
class ToolRule:
    """A tool that may be called.

    Args:
        name: as declared.
        schema: of its arguments.
        is_strict: whether arguments must meet the whole of the schema; for other tools, keywords that no
            grammar can express are left out.
        param: the request's field that holds the schema, for refusals.
    """

    name: str
    schema: Mapping[str, Any]
    is_strict: bool
    param: str


@dataclass(frozen=True, slots=True)
class AnswerRules:
    """All that an answer must keep to.

    Args:
        content: None leaves it free.
        tools: those that may be called.
        must_call: whether the answer is one or more calls and nothing else.
        max_calls: at most so many.
    """

    content: ContentRule | None = None
    tools: tuple[ToolRule, ...] = ()
    must_call: bool = False
    max_calls: int | None = None

    @property
    def is_free(self) -> bool:
        """Whether nothing is demanded that the model could fail to do."""
        has_strict_tools = any(tool.is_strict for tool in self.tools)
        return self.content is None and not self.must_call and not has_strict_tools


@dataclass(frozen=True, slots=True)
class CallMarks:
    """The token ids that stand around tool calls and inside them."""

    section_begin: int
    section_end: int
    call_begin: int
    arguments_begin: int
    call_end: int
