"""The conversation as the model was trained to read it.

Special tokens are written by this module and by nothing else: a prompt is a row of plain texts with special
tokens between them, and text of users only ever lands in the plain ones. Whatever it spells, it stays text.

The same messages always give the same prompt, and messages added at the end leave what is before them as it
was, but for the reasoning of a tool loop that has come to its end, which the model is not shown again.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Final

from backend.text.kimi.history import MediaPart, Turn, read_history
from backend.text.kimi.thinking import Thinking
from backend.text.kimi.tool_declaration import declare_tools
from backend.text.messages import BadMessageError

DEFAULT_SYSTEM: Final = "You are Kimi, an AI assistant created by Moonshot AI."

_ROLE_TOKENS: Final = {"user": "<|im_user|>", "assistant": "<|im_assistant|>"}
_SYSTEM_TOKEN: Final = "<|im_system|>"
VIDEO_PLACEHOLDER: Final = "<|kimi_k25_video_placeholder|>"


@dataclass(slots=True)
class PromptPieces:
    """A rendered prompt: ``texts[0]``, ``specials[0]``, ``texts[1]``, ... ``texts[-1]``.

    ``specials`` are spellings of special tokens; no text between them holds one that counts. ``media`` are
    the images and videos in the order of their placeholders.
    """

    texts: list[str] = field(default_factory=lambda: [""])
    specials: list[str] = field(default_factory=list)
    media: list[MediaPart] = field(default_factory=list)

    @property
    def text(self) -> str:
        """Everything as one text, for people: a special token and its spelling look the same in it."""
        joined = [self.texts[0]]
        for special, text in zip(self.specials, self.texts[1:], strict=True):
            joined += (special, text)
        return "".join(joined)

    def add_text(self, text: str) -> None:
        self.texts[-1] += text

    def add_special(self, spelling: str) -> None:
        self.specials.append(spelling)
        self.texts.append("")


class KimiTemplate:
    """Renders conversations; pure and thread-safe.

    Args:
        adds_default_system: whether a conversation that does not begin with a system message gets the one
            that earlier releases of the model put there.
    """

    def __init__(self, *, adds_default_system: bool = False) -> None:
        self._adds_default_system = adds_default_system

    def render(
        self,
        messages: Sequence[Mapping[str, Any]],
        *,
        tools: Sequence[Mapping[str, Any]] = (),
        thinking: Thinking | None = None,
        add_generation_prompt: bool = True,
    ) -> PromptPieces:
        """Render a conversation.

        Raises:
            BadMessageError: naming the field that cannot be rendered.
        """
        thinking = thinking or Thinking()
        turns = read_history(messages)
        prompt = PromptPieces()
        if tools:
            _open(prompt, _SYSTEM_TOKEN, "tool_declare")
            prompt.add_text(_declaration(tools))
            prompt.add_special("<|im_end|>")
        if self._adds_default_system and turns[0].role != "system":
            _write_turn(prompt, Turn("system", "system", [DEFAULT_SYSTEM]), shows_reasoning=False)
        first_open = 0 if thinking.keeps_history else _first_of_running_loop(turns)
        for index, turn in enumerate(turns):
            _write_turn(prompt, turn, shows_reasoning=thinking.is_on and index >= first_open)
        if add_generation_prompt:
            _open(prompt, _ROLE_TOKENS["assistant"], "assistant")
            prompt.add_special("<think>")
            if not thinking.is_on:
                prompt.add_special("</think>")
        return prompt


def _declaration(tools: Sequence[Mapping[str, Any]]) -> str:
    try:
        return declare_tools(tools)
    except RecursionError as error:
        raise BadMessageError("tools", "are nested too deeply") from error


def _first_of_running_loop(turns: Sequence[Turn]) -> int:
    """The index behind the last answer without calls: from there on the model is still at work."""
    for index in range(len(turns) - 1, -1, -1):
        if turns[index].role == "assistant" and not turns[index].calls:
            return index + 1
    return 0


def _open(prompt: PromptPieces, role_token: str, name: str) -> None:
    prompt.add_special(role_token)
    prompt.add_text(name)
    prompt.add_special("<|im_middle|>")


def _write_turn(prompt: PromptPieces, turn: Turn, *, shows_reasoning: bool) -> None:
    _open(prompt, _ROLE_TOKENS.get(turn.role, _SYSTEM_TOKEN), turn.name)
    if turn.role == "assistant":
        prompt.add_special("<think>")
        if shows_reasoning:
            prompt.add_text(turn.reasoning)
        prompt.add_special("</think>")
    elif turn.role == "tool":
        prompt.add_text(f"## Return of {turn.answers}\n")
    for part in turn.content:
        if isinstance(part, str):
            prompt.add_text(part)
        else:
            _write_media(prompt, part)
    if turn.calls:
        _write_calls(prompt, turn)
    prompt.add_special("<|im_end|>")


def _write_media(prompt: PromptPieces, part: MediaPart) -> None:
    prompt.media.append(part)
    if part.kind == "video":
        prompt.add_text(VIDEO_PLACEHOLDER)
    else:
        prompt.add_special("<|media_begin|>")
        prompt.add_text("image")
        prompt.add_special("<|media_content|>")
        prompt.add_special("<|media_pad|>")
        prompt.add_special("<|media_end|>")
    # The model has always seen a line break there.
    prompt.add_text("\n")


def _write_calls(prompt: PromptPieces, turn: Turn) -> None:
    prompt.add_special("<|tool_calls_section_begin|>")
    for call in turn.calls:
        prompt.add_special("<|tool_call_begin|>")
        prompt.add_text(call.id)
        prompt.add_special("<|tool_call_argument_begin|>")
        prompt.add_text(call.arguments)
        prompt.add_special("<|tool_call_end|>")
    prompt.add_special("<|tool_calls_section_end|>")
