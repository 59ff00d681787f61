"""What the model says becomes reasoning, content and tool calls, token by token.

    reasoning </think> content <|tool_calls_section_begin|>
        <|tool_call_begin|> id <|tool_call_argument_begin|> arguments <|tool_call_end|> ...
    <|tool_calls_section_end|> content

Models do not always keep to that, so every mark means something everywhere: a call ends reasoning and needs
no section around it, a new call ends the one before, and a mark where it makes no sense is left out. Text is
never left out unless it is white space beside a call: what stands between or behind calls is content.

Arguments are passed on as they come. When a call ends they are judged, and what is not a JSON object is said
to be none (:class:`backend.text.parts.CallFailed`); nothing is repaired and nothing is lost in silence.
"""

from __future__ import annotations

import enum
from dataclasses import dataclass, field
from typing import Final

from backend.engine.messages import SequenceFinish
from backend.text.kimi.call_ids import native_id
from backend.text.kimi.marks import Mark, Marks, MarkScanner
from backend.text.parts import (
    CallArguments,
    CallBegun,
    CallFailed,
    CallProblem,
    ContentText,
    Part,
    ReasoningText,
    join_parts,
)
from backend.text.tool_calls import ArgumentsText, DeclaredTools
from backend.text.trimming import NotBlank, RightTrimmed

# A longer text, or one with white space inside, is no id of a call.
_MAX_ID_CHARS: Final = 256


@dataclass(frozen=True, slots=True)
class KimiOutputForm:
    """How the answers to one request are to be read.

    Args:
        marks: those of the vocabulary.
        tools: those that may be called; without any, no call is ever made.
        first_call_index: the number of the answer's first call in the conversation.
        is_thinking: whether the answer begins inside reasoning.
        max_calls: so many calls make the answer complete.
    """

    marks: Marks
    tools: DeclaredTools
    first_call_index: int = 0
    is_thinking: bool = True
    max_calls: int | None = None

    def new_parser(self) -> KimiParser:
        return KimiParser(self)


class _State(enum.Enum):
    REASONING = enum.auto()
    CONTENT = enum.auto()
    SECTION = enum.auto()  # inside a section of calls, outside a call
    CALL_ID = enum.auto()
    ARGUMENTS = enum.auto()


@dataclass(slots=True)
class _OpenCall:
    """The call that is being read. ``index`` is None while it is not clear which tool it means."""

    said_id: str
    index: int | None
    arguments: ArgumentsText = field(default_factory=ArgumentsText)


class KimiParser:
    """The reader of one choice; see :class:`backend.text.parts.OutputParser`."""

    def __init__(self, form: KimiOutputForm) -> None:
        self._form = form
        self._by_id = form.marks.by_id
        self._scanner = MarkScanner(form.marks.in_text)
        self._state = _State.REASONING if form.is_thinking else _State.CONTENT
        self._is_in_section = False
        self._reasoning = RightTrimmed()
        self._content = NotBlank()
        self._loose: list[str] = []  # text of an id, or of a section outside its calls that may be one
        self._is_loose_content = False  # it was none: the rest of it is content too
        self._call: _OpenCall | None = None
        self._has_content = False
        self._parts: list[Part] = []
        self.num_calls = 0
        self.num_reasoning_tokens = 0
        self.is_over = False

    def is_mark(self, token_id: int) -> bool:
        return token_id in self._by_id

    def count(self, token_id: int) -> None:
        """Count a token as reasoning when it is, the marks around reasoning included."""
        mark = self._by_id.get(token_id)
        if self._state is _State.REASONING:
            if mark not in (Mark.SECTION_BEGIN, Mark.CALL_BEGIN):
                self.num_reasoning_tokens += 1
        elif mark is Mark.THINK_BEGIN and self._can_think_again():
            self.num_reasoning_tokens += 1

    def feed(self, token_id: int, text: str) -> None:
        if self.is_over:
            return
        mark = self._by_id.get(token_id)
        if mark is not None:
            self._text(self._scanner.flush())
            self._mark(mark)
            return
        for item in self._scanner.push(text):
            if isinstance(item, Mark):
                self._mark(item)
            else:
                self._text(item)

    def finish(self, reason: SequenceFinish) -> None:
        if self.is_over:
            return
        self._text(self._scanner.flush())
        if self._state is _State.CALL_ID:
            self._end_id(is_complete=reason == "stop")
        elif self._state is _State.ARGUMENTS:
            self._end_call(is_complete=reason == "stop")
        elif self._state is _State.SECTION:
            self._end_loose_text()
        blank = self._content.end()
        if blank and not self._has_content and self.num_calls == 0:
            self._parts.append(ContentText(blank))  # white space is all that there is: an answer like others
        self.is_over = True

    def take_parts(self) -> list[Part]:
        parts, self._parts = self._parts, []
        return join_parts(parts) if len(parts) > 1 else parts

    # --- text ---------------------------------------------------------------------------------------

    def _text(self, text: str) -> None:
        if not text:
            return
        state = self._state
        if state is _State.REASONING:
            if shown := self._reasoning.push(text):
                self._parts.append(ReasoningText(shown))
        elif state is _State.CONTENT:
            self._show_content(text)
        elif state is _State.ARGUMENTS:
            self._show_arguments(text)
        elif self._is_loose_content:
            self._show_content(text)
        else:
            self._loose.append(text)
            if state is _State.SECTION and not text.isspace() and not _can_be_id("".join(self._loose)):
                self._end_loose_text()
                self._is_loose_content = True

    def _show_content(self, text: str) -> None:
        if shown := self._content.push(text):
            self._has_content = True
            self._parts.append(ContentText(shown))

    def _show_arguments(self, text: str) -> None:
        assert self._call is not None
        shown = self._call.arguments.push(text)
        if shown and self._call.index is not None:
            self._parts.append(CallArguments(self._call.index, shown))

    def _end_loose_text(self) -> None:
        """What stands in a section and is no call is content, unless it is white space."""
        loose = self._take_loose()
        self._is_loose_content = False
        if loose.strip():
            self._show_content(loose)

    def _take_loose(self) -> str:
        loose = "".join(self._loose)
        self._loose.clear()
        return loose

    # --- marks --------------------------------------------------------------------------------------

    def _mark(self, mark: Mark) -> None:
        if self.is_over:
            return
        if mark in (Mark.THINK_BEGIN, Mark.THINK_END, Mark.ODD_SECTION_BEGIN, Mark.ODD_SECTION_END):
            self._minor_mark(mark)
        elif mark is Mark.SECTION_BEGIN:
            self._leave()
            self._is_in_section = True
            self._state = _State.SECTION
        elif mark is Mark.CALL_BEGIN:
            self._leave()
            self._begin_call()
        elif mark is Mark.ARGUMENTS_BEGIN:
            self._begin_arguments()
        elif self._state is not _State.REASONING:  # the end of a call or of a section
            is_section_end = mark is Mark.SECTION_END
            if is_section_end or self._state in (_State.CALL_ID, _State.ARGUMENTS):
                self._leave()
            if is_section_end:
                self._is_in_section = False
                self._state = _State.CONTENT

    def _minor_mark(self, mark: Mark) -> None:
        if self._state is _State.ARGUMENTS:
            # Arguments may well hold a file that speaks of such things: there they are text.
            self._text(mark.value)
        elif mark is Mark.THINK_BEGIN and self._can_think_again():
            self._leave()
            self._state = _State.REASONING
        elif mark is Mark.THINK_END and self._state is _State.REASONING:
            self._leave()

    def _can_think_again(self) -> bool:
        return self._form.is_thinking and self._state in (_State.CONTENT, _State.SECTION)

    def _leave(self) -> None:
        """End whatever is being read; what follows is content, or the rest of a section."""
        if self._state is _State.REASONING:
            self._reasoning.end()
        elif self._state is _State.CALL_ID:
            self._end_id(is_complete=True)
        elif self._state is _State.ARGUMENTS:
            self._end_call(is_complete=True)
        elif self._state is _State.SECTION:
            self._end_loose_text()
        self._state = _State.SECTION if self._is_in_section else _State.CONTENT

    # --- calls --------------------------------------------------------------------------------------

    def _begin_call(self) -> None:
        self._content.end()
        if self._form.max_calls is not None and self.num_calls >= self._form.max_calls:
            self.is_over = True
            return
        self._state = _State.CALL_ID

    def _begin_arguments(self) -> None:
        said = self._take_loose()
        # A section whose call has lost its first mark: what was said there last is the id.
        if self._state is _State.SECTION and said.strip():
            self._begin_call()
        if self._state is _State.CALL_ID and not self.is_over:
            self._open_call(said)
            self._state = _State.ARGUMENTS

    def _open_call(self, said_id: str) -> None:
        said_id = said_id.strip()
        name = self._form.tools.name_of(said_id) if len(self._form.tools) else None
        self._call = _OpenCall(said_id, None if name is None else self._announce(name))

    def _announce(self, name: str) -> int:
        index = self.num_calls
        self.num_calls += 1
        self._parts.append(CallBegun(index, native_id(name, self._form.first_call_index + index), name))
        return index

    def _end_id(self, *, is_complete: bool) -> None:
        """A call that ends before its arguments began: it may have them all the same, or need none."""
        said = self._take_loose()
        if not is_complete or not said.strip():
            self._fail(None, "incomplete", "the call ends inside its id", said.strip())
            return
        said_id, brace, arguments = said.partition("{")
        self._open_call(said_id)
        self._show_arguments(brace + arguments)
        self._end_call(is_complete=True)

    def _end_call(self, *, is_complete: bool) -> None:
        call, self._call = self._call, None
        assert call is not None
        said = call.arguments.text
        if call.index is None:
            self._end_unnamed_call(call, said, is_complete=is_complete)
            return
        if is_complete and not said:
            self._parts.append(CallArguments(call.index, "{}"))
            return
        problem = call.arguments.problem()
        if problem is not None:
            code: CallProblem = "invalid_arguments" if is_complete else "incomplete"
            self._fail(call.index, code, problem)

    def _end_unnamed_call(self, call: _OpenCall, said: str, *, is_complete: bool) -> None:
        if not len(self._form.tools):
            self._fail(None, "tool_not_allowed", "the request has no tools", call.said_id, said)
            return
        name = self._form.tools.infer(said) if is_complete else None
        if name is None:
            problem = "the call's id names no tool, and its arguments do not fit exactly one"
            self._fail(None, "unknown_tool" if is_complete else "incomplete", problem, call.said_id, said)
            return
        self._parts.append(CallArguments(self._announce(name), said or "{}"))

    def _fail(
        self, index: int | None, code: CallProblem, message: str, said_id: str = "", said: str = ""
    ) -> None:
        self._parts.append(CallFailed(index, code, message, said_id, said))


def _can_be_id(text: str) -> bool:
    text = text.strip()
    return len(text) <= _MAX_ID_CHARS and not any(map(str.isspace, text))
