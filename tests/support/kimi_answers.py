"""Answers in Kimi's own marks, read the way a replica reads them."""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any

from backend.engine.messages import SequenceFinish, TokenOutput
from backend.text.kimi.marks import Marks
from backend.text.kimi.parser import KimiOutputForm
from backend.text.output import ChoiceText
from backend.text.parts import CallArguments, CallBegun, CallFailed, ContentText, Part, ReasoningText
from backend.text.stop_strings import StopStrings
from backend.text.tool_calls import DeclaredTools
from backend.wire import FinishReason
from tests.support.kimi_text import spoken, tiny_tokenizer

SECTION, SECTION_END = "<|tool_calls_section_begin|>", "<|tool_calls_section_end|>"
CALL, ARGUMENTS, CALL_END = "<|tool_call_begin|>", "<|tool_call_argument_begin|>", "<|tool_call_end|>"
END = "<|im_end|>"

TOOLS: list[dict[str, Any]] = [
    {
        "type": "function",
        "function": {
            "name": "get_weather",
            "parameters": {
                "type": "object",
                "properties": {"city": {"type": "string"}, "days": {"type": "integer"}},
                "required": ["city"],
            },
        },
    },
    {
        "type": "function",
        "function": {
            "name": "fs.read-file:v2",
            "parameters": {
                "type": "object",
                "properties": {"path": {"type": "string"}},
                "required": ["path"],
                "additionalProperties": False,
            },
        },
    },
]


@dataclass
class Message:
    """A whole answer, joined from its parts, with everything that a stream could get wrong checked."""

    reasoning: str = ""
    content: str = ""
    ids: list[str] = field(default_factory=list)
    names: list[str] = field(default_factory=list)
    arguments: list[str] = field(default_factory=list)
    failures: list[tuple[int | None, str, str, str]] = field(default_factory=list)
    finish_reason: FinishReason | None = None
    num_tokens: int = 0
    num_reasoning_tokens: int = 0

    def add(self, part: Part) -> None:
        if isinstance(part, ReasoningText):
            assert part.text
            self.reasoning += part.text
        elif isinstance(part, ContentText):
            assert part.text
            self.content += part.text
        elif isinstance(part, CallBegun):
            assert part.index == len(self.ids)
            assert part.id
            assert part.name
            self.ids.append(part.id)
            self.names.append(part.name)
            self.arguments.append("")
        elif isinstance(part, CallArguments):
            assert part.text
            assert part.index == len(self.ids) - 1
            self.arguments[part.index] += part.text
        else:
            assert isinstance(part, CallFailed)
            assert part.message
            self.failures.append((part.index, part.code, part.said_id, part.said_arguments))

    @property
    def calls(self) -> list[tuple[str, str]]:
        return list(zip(self.names, self.arguments, strict=True))


def make_form(*, vocabulary: dict[str, int] | None = None, **options: Any) -> KimiOutputForm:
    known = tiny_tokenizer().special_tokens if vocabulary is None else vocabulary
    tools = DeclaredTools(options.pop("tools", TOOLS))
    return KimiOutputForm(marks=Marks(known), tools=tools, **options)


def read_tokens(
    token_ids: Sequence[int],
    cuts: Iterable[int] = (),
    *,
    form: KimiOutputForm | None = None,
    stops: Sequence[str] = (),
    finish: SequenceFinish = "stop",
) -> Message:
    """Read an answer whose tokens arrive in pieces, cut at the given places."""
    form = form or make_form()
    parser = form.new_parser()
    text = ChoiceText(tiny_tokenizer().token_bytes, StopStrings(stops) if stops else None, parser)
    message = Message()
    edges = sorted({0, len(token_ids), *(cut for cut in cuts if 0 < cut < len(token_ids))})
    for start, end in list(itertools.pairwise(edges)) or [(0, 0)]:
        is_last = end == len(token_ids)
        assert (
            text.push(
                TokenOutput(
                    sequence_id=1,
                    token_ids=list(token_ids[start:end]),
                    finish_reason=finish if is_last else None,
                )
            )
            == ""
        )
        for part in text.take_parts():
            message.add(part)
        if text.finish_reason is not None:
            break
    message.finish_reason = text.finish_reason
    message.num_tokens = text.num_tokens
    message.num_reasoning_tokens = text.num_reasoning_tokens
    return message


def read(answer: str, **options: Any) -> Message:
    """Read an answer in which marks are spelled out, as one piece. It ends with the end token on "stop"."""
    finish = options.get("finish", "stop")
    return read_tokens(spoken(answer + (END if finish == "stop" else "")), **options)


def call(call_id: str, arguments: str) -> str:
    return f"{CALL}{call_id}{ARGUMENTS}{arguments}{CALL_END}"


def section(*calls: str) -> str:
    return SECTION + "".join(calls) + SECTION_END
